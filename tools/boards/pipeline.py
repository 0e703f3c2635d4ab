"""Each hop: how much lies before it, how long it waits, how long it is handled."""

from tools.boards.panels import Board, Look, Panel, Row
from tools.boards.queries import OF_PROCESS, PROCESS, Query, largest, quantile, quantiles, rate, total
from tools.boards.stages import slowest_stages, stage_quantiles

WAIT, WORK = "penstock_hop_wait_seconds", "penstock_hop_work_seconds"

BOARD = Board(
    "pipeline",
    "Pipeline",
    "Where a request's time goes: every hop between gateway, tokenizer, scheduler, worker and detokenizer.",
    [
        Row(
            "Where a request's time goes",
            [
                slowest_stages(board="scheduler"),
                Panel(
                    "Stages to the first token, p95",
                    "s",
                    "The same stages over time, on a logarithmic axis.",
                    "The line that rose when first tokens became late is the cause.",
                    stage_quantiles(0.95),
                    Look.LOGARITHMIC,
                    runbook="PenstockFirstTokenBudgetBurn",
                ),
            ],
            height=10,
            columns=2,
        ),
        Row(
            "Depth: what lies before each service",
            [
                Panel(
                    "Entries of streams",
                    "short",
                    "Prompts that no tokenizer and requests that no scheduler has finished with, and dead letters.",
                    "prompts: more tokenizers. requests: is there a scheduler? dead: the runbook.",
                    [Query(largest("penstock_queue_depth", "stream"), "{{stream}}")],
                    runbook="PenstockDeadLetters",
                    board="reliability",
                ),
                Panel(
                    "Log not yet read",
                    "short",
                    "Entries of each shard that its detokenizer has not read.",
                    "One shard: its detokenizer is stuck or too busy. All: more detokenizers. Beyond "
                    "`--max-log-backlog` schedulers plan no steps.",
                    [Query(largest("penstock_log_backlog", "shard"), "shard {{shard}}")],
                    limits=(8192,),
                    runbook="PenstockLogBacklog",
                ),
                Panel(
                    "Plans",
                    "short",
                    "Plans sent to workers and not answered, and those that workers have read and not launched: what "
                    "the device has before it.",
                    "0 while requests wait: the scheduler does not keep up; see its work below.",
                    [
                        Query(total("penstock_plans_in_flight"), "sent, not answered"),
                        Query(total("penstock_plans_queued"), "read, not launched"),
                    ],
                    board="scheduler",
                ),
            ],
        ),
        Row(
            "Wait and work of each hop",
            [
                Panel(
                    "Wait, p95",
                    "s",
                    "From sending a message to receiving it, by stream: prompts to tokenizers, requests, results and "
                    "cancels to schedulers, steps to workers, tokens to detokenizers, text to gateways.",
                    "Who reads the stream is too busy or too few (see work) or Redis is slow (see below). Clocks of "
                    "hosts that differ show here too.",
                    [Query(quantile(0.95, WAIT, "hop"), "{{hop}}")],
                    Look.LOGARITHMIC,
                ),
                Panel(
                    "Work, p95",
                    "s",
                    "Time of handling a message, by stream.",
                    "Milliseconds for `steps`, less for the others. A service's core is shared, or messages became "
                    "larger.",
                    [Query(quantile(0.95, WORK, "hop"), "{{hop}}")],
                    Look.LOGARITHMIC,
                ),
                Panel(
                    "Busy with a hop",
                    "percentunit",
                    "The share of its time that the busiest process of a service spends on a stream's messages.",
                    "Above 80 % the hop is the bottleneck: more processes of the service that reads it.",
                    [Query(f"max by (hop) ({rate(f'{WORK}_sum', f'{PROCESS}, hop')})", "{{hop}}")],
                    limits=(0.8,),
                ),
                Panel(
                    "Messages",
                    "mps",
                    "Messages a second, by stream.",
                    "A hop that falls to 0 while the one before it does not: its service is gone or stuck.",
                    [Query(rate(f"{WAIT}_count", "hop"), "{{hop}}")],
                    Look.LOGARITHMIC,
                    runbook="PenstockNoProgress",
                    board="reliability",
                ),
                Panel(
                    "Messages on their way",
                    "short",
                    "How many messages of each stream wait at once: the seconds that they waited, a second.",
                    "The stream that has most holds up the others; one plan or one piece of text carries many "
                    "requests.",
                    [Query(rate(f"{WAIT}_sum", "hop"), "{{hop}}")],
                    Look.STACK,
                ),
                Panel(
                    "Text at gateways",
                    "short",
                    "Pieces of text a second by what became of them.",
                    "gap: text was lost or overtaken and asked for again; duplicate: after a detokenizer was replaced. "
                    "Both are mended by themselves and should be rare.",
                    [Query(rate("penstock_text_rows_total", "result"), "{{result}}")],
                    board="reliability",
                ),
            ],
        ),
        Row(
            "Tokenizers, detokenizers and Redis",
            [
                Panel(
                    "Prompts tokenized",
                    "reqps",
                    "Prompts a second, by outcome.",
                    "rejected: callers send prompts that are wrong or too long; gateways' logs at level debug name "
                    "them.",
                    [Query(rate("penstock_tokenizer_prompts_total", "outcome"), "{{outcome}}")],
                ),
                Panel(
                    "Tokens in and out",
                    "short",
                    "Tokens a second of prompts that tokenizers made, and tokens that detokenizers turned into text.",
                    "Text falls while steps go on: detokenizers do not keep up; see the log above.",
                    [
                        Query(rate("penstock_tokenizer_tokens_total"), "tokenized"),
                        Query(rate("penstock_detokenized_tokens_total"), "turned into text"),
                    ],
                ),
                Panel(
                    "Requests that detokenizers follow",
                    "short",
                    "Requests that go on, by detokenizer.",
                    "They are spread by shards. A process without any while others have many has no shard: see "
                    "*Reliability*.",
                    [Query(total("penstock_live_requests", PROCESS), OF_PROCESS)],
                    board="reliability",
                ),
                Panel(
                    "Redis: time until its answer",
                    "s",
                    "All calls of all services together.",
                    "More than a few milliseconds delays every hop: the runbook says what to look at on the server.",
                    quantiles("penstock_bus_call_seconds"),
                    limits=(0.1,),
                    runbook="PenstockRedisSlow",
                    board="reliability",
                ),
                Panel(
                    "Redis: slowest calls, p99",
                    "s",
                    "The eight calls whose 99th percentile is the longest.",
                    "One call alone: a large request or result. All: the server or the network.",
                    [Query(f"topk(8, {quantile(0.99, 'penstock_bus_call_seconds', 'call')})", "{{call}}")],
                    Look.GAUGE,
                    runbook="PenstockRedisSlow",
                ),
                Panel(
                    "Redis: calls",
                    "ops",
                    "Calls a second, the eight most frequent.",
                    "The server has one thread: at tens of thousands a second begin a second pool.",
                    [Query(f"topk(8, {rate('penstock_bus_call_seconds_count', 'call')})", "{{call}}")],
                    Look.GAUGE,
                    board="capacity",
                ),
            ],
        ),
        Row(
            "Traces of requests",
            [
                Panel(
                    "Spans told",
                    "ops",
                    "Spans of traces a second that a collector took, and times a second that it took none. Without "
                    "`--otlp-traces-endpoint` both are 0.",
                    "Failures: the collector is away or refuses; spans wait in the pool meanwhile.",
                    [
                        Query(rate("penstock_exported_spans_total"), "spans"),
                        Query(rate("penstock_span_export_failures_total"), "failures"),
                    ],
                ),
                Panel(
                    "Traces not told",
                    "short",
                    "Entries of the stream of traces that wait for a collector, and those that it had no room for "
                    "since the pool began.",
                    "Waiting ones grow: the collector is too slow or away. What had no room will never be seen there.",
                    [
                        Query(largest("penstock_waiting_traces"), "waiting"),
                        Query(largest("penstock_untold_traces"), "no room"),
                    ],
                ),
            ],
            height=6,
            columns=2,
        ),
    ],
)
