"""Is the pool well, and if it is slow: where to read on."""

from tools.boards.panels import Board, Look, Panel, Row
from tools.boards.queries import Query, events, quantiles, rate, series, starts, total
from tools.boards.stages import slowest_stages

TTFT, ITL, WHOLE = (
    f"penstock_{name}_seconds" for name in ("time_to_first_token", "inter_token_latency", "e2e_request_latency")
)

FIGURES = (
    Panel(
        "Requests that end",
        "reqps",
        "Requests that ended a second, however they ended, over five minutes.",
        "None, while streams are open: read *Reliability*, and the runbook PenstockNoProgress.",
        [Query(series("namespace:penstock_requests:rate5m"), "{{namespace}}")],
        Look.FIGURE,
        runbook="PenstockNoProgress",
        board="capacity",
    ),
    Panel(
        "Errors",
        "percentunit",
        "The share of answered requests that ended with an error that is not their caller's. The objective is 0.1 %.",
        "Read *Reliability*: what died or was lost in these minutes; errors in the logs name requests.",
        [Query(series("namespace:penstock_errors:ratio_rate5m"), "{{namespace}}")],
        Look.FIGURE,
        (0.001, 0.0144),
        runbook="PenstockErrorBudgetBurn",
        board="reliability",
    ),
    Panel(
        "First token, p95",
        "s",
        "Of a hundred requests five wait longer than this for their first token. The objective is 2.5 s.",
        "The slowest stages are in the row below; the board *Pipeline* has their past.",
        [Query(series(f"namespace:{TTFT}:p95_rate5m"), "{{namespace}}")],
        Look.FIGURE,
        (2.5,),
        runbook="PenstockFirstTokenBudgetBurn",
        board="pipeline",
    ),
    Panel(
        "Between tokens, p95",
        "s",
        "Time between two tokens of one request, as its client sees it.",
        "Compare with the device time of a step on *Worker*: steps grow with sequences and with chunks of long "
        "prompts.",
        [Query(series(f"namespace:{ITL}:p95_rate5m"), "{{namespace}}")],
        Look.FIGURE,
        board="worker",
    ),
    Panel(
        "Wait for a slot",
        "s",
        "Time in which all that waits would start, at the rate of late; while nothing starts, for how long the first "
        "has waited.",
        "Add workers, or see on *Capacity & tenants* whose requests they are.",
        [Query(series("namespace:penstock_expected_wait_seconds:max"), "{{namespace}}")],
        Look.FIGURE,
        (5, 60),
        runbook="PenstockQueueWait",
        board="capacity",
    ),
    Panel(
        "KV cache in use",
        "percentunit",
        "The share of all workers' KV blocks that sequences hold.",
        "Above 95 % sequences are preempted and computed again: add workers, or bound `--max-num-seqs`.",
        [Query(series("namespace:penstock_kv_usage:ratio"), "{{namespace}}")],
        Look.FIGURE,
        (0.85, 0.95),
        runbook="PenstockKvCacheFull",
        board="scheduler",
        is_share=True,
    ),
    Panel(
        "Processes lost",
        "short",
        "Processes whose lease has run out, in the last minute. Those that ended in order do not count.",
        "Look for their names in `penstock status` and for the end of their logs; *Reliability* says what was lost.",
        [
            Query(
                f"max by (namespace) ({total('penstock_sessions', 'namespace, instance, process', 'state=dead')})",
                "{{namespace}}",
            )
        ],
        Look.FIGURE,
        (1,),
        board="reliability",
    ),
    Panel(
        "Alerts that fire",
        "short",
        "Alerts of Penstock that fire now.",
        "Each has a runbook with the cause, what to look at and what to do.",
        [Query(f"count({series('ALERTS', 'alertname=~Penstock.*, alertstate=firing')}) or vector(0)", "alerts")],
        Look.FIGURE,
        (1,),
        runbook="PenstockErrorBudgetBurn",
        board="reliability",
    ),
)

BOARD = Board(
    "overview",
    "Overview",
    "Is the pool well? If it is slow, the row 'Why is it slow' names the stage, and its links lead to the board.",
    [
        Row("Now", FIGURES, height=4, columns=8),
        Row(
            "Why is it slow",
            [
                slowest_stages(board="pipeline"),
                Panel(
                    "Time to the first token",
                    "s",
                    "From the arrival of a request to its first token, as its client sees it.",
                    "p99 alone: single long prompts, or a process that was lost. All of them: requests wait for "
                    "slots, or a stage on the left is slow for everybody.",
                    quantiles(TTFT),
                    limits=(2.5,),
                    runbook="PenstockFirstTokenBudgetBurn",
                    board="pipeline",
                ),
                Panel(
                    "Time between tokens",
                    "s",
                    "Between two tokens of one request, as its client sees it.",
                    "All of them: steps are long (*Worker*). p99 alone: preemptions (*Scheduler & KV*) or a process "
                    "that was lost (*Reliability*).",
                    quantiles(ITL),
                    board="worker",
                ),
            ],
            height=9,
        ),
        Row(
            "What is asked and given",
            [
                Panel(
                    "Requests by how they ended",
                    "reqps",
                    "stop and length are answers; cancelled: the client left; rejected: refused before anything ran.",
                    "error: read *Reliability*. rejected: too much waits, a key's limit, or callers send what is "
                    "wrong.",
                    [Query(rate("penstock_requests_total", "outcome"), "{{outcome}}")],
                    Look.STACK,
                    runbook="PenstockErrorBudgetBurn",
                    board="reliability",
                ),
                Panel(
                    "Tokens",
                    "short",
                    "Tokens a second: of prompts that got a slot, of these found in the prefix cache, and handed to "
                    "clients.",
                    "Fewer are handed out while requests wait: workers are slower or fewer than before.",
                    [
                        Query(rate("penstock_prompt_tokens_total"), "prompts"),
                        Query(rate("penstock_cached_tokens_total"), "found in the cache"),
                        Query(rate("penstock_delivered_tokens_total"), "handed to clients"),
                    ],
                    board="worker",
                ),
                Panel(
                    "Whole requests",
                    "s",
                    "From the arrival of a request to its end. It grows with the tokens that callers ask for.",
                    "Compare with the two panels above: more tokens, or slower ones?",
                    quantiles(WHOLE),
                    board="pipeline",
                ),
                Panel(
                    "Open and waiting requests",
                    "short",
                    "Requests being served by gateways, and those of the pool that wait for their first slot.",
                    "What waits grows for minutes: add workers; autoscaling follows the same figure.",
                    [
                        Query(series("namespace:penstock_open_streams:sum"), "open {{namespace}}"),
                        Query(series("namespace:penstock_waiting_requests:max"), "waiting {{namespace}}"),
                    ],
                    runbook="PenstockQueueWait",
                    board="capacity",
                ),
                Panel(
                    "First tokens too late",
                    "percentunit",
                    "The share of first tokens after more than 2.5 s, over an hour and over six. 5 % may be late; at "
                    "30 % of six hours or 72 % of one an alert fires.",
                    "The stages above say where the time goes; the runbook says what to change.",
                    [
                        Query(series("namespace:penstock_slow_first_tokens:ratio_rate1h"), "1 h {{namespace}}"),
                        Query(series("namespace:penstock_slow_first_tokens:ratio_rate6h"), "6 h {{namespace}}"),
                    ],
                    limits=(0.3, 0.72),
                    runbook="PenstockFirstTokenBudgetBurn",
                    board="pipeline",
                    is_share=True,
                ),
                Panel(
                    "Sessions lost, processes started",
                    "short",
                    "In five minutes: times that processes lost their hold on the pool, and processes started anew.",
                    "Now and then is a restart or a deployment, and no stream ends with it. Again and again: the "
                    "runbook.",
                    [
                        Query(events("penstock_session_losses_total"), "sessions lost"),
                        Query(starts(), "processes started"),
                    ],
                    Look.BARS,
                    runbook="PenstockLeaseFlapping",
                    board="reliability",
                ),
            ],
        ),
    ],
)
