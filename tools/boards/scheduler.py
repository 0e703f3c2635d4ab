"""Plans, and the reasons for which requests wait: slots, KV blocks, preemptions, the prefix cache."""

from tools.boards.panels import Board, Look, Panel, Row
from tools.boards.queries import Query, largest, quantiles, rate, series, total

KV = "penstock_kv_blocks"

BOARD = Board(
    "scheduler",
    "Scheduler & KV",
    "Why do requests wait: slots, KV blocks, preemptions; and what the prefix cache saves.",
    [
        Row(
            "Waiting",
            [
                Panel(
                    "Wait for a slot",
                    "s",
                    "From a scheduler's claim of a request to its first slot.",
                    "More workers, or more slots (`--max-num-seqs`) if KV blocks are free.",
                    quantiles("penstock_queue_time_seconds"),
                    runbook="PenstockQueueWait",
                    board="capacity",
                ),
                Panel(
                    "Sequences",
                    "short",
                    "Sequences that have a slot, and those that wait for one or were put back.",
                    "running stays below what workers can hold while some wait: KV blocks are the bound, or a worker "
                    "is not paired (`penstock status`).",
                    [Query(total("penstock_sequences", "state"), "{{state}}")],
                    Look.STACK,
                    runbook="PenstockQueueWait",
                    board="capacity",
                ),
                Panel(
                    "Waiting in the pool",
                    "short",
                    "Requests of the pool that wait for their first slot, and tokens of their prompts in thousands.",
                    "Few requests of many tokens: long prompts; bound `--max-waiting-tokens` or add workers.",
                    [
                        Query(series("namespace:penstock_waiting_requests:max"), "requests {{namespace}}"),
                        Query(f"{largest('penstock_waiting_tokens')} / 1000", "thousand tokens"),
                    ],
                    runbook="PenstockQueueWait",
                    board="capacity",
                ),
            ],
        ),
        Row(
            "KV cache",
            [
                Panel(
                    "KV blocks",
                    "short",
                    "Blocks of all workers: used by sequences; cached: free, with content that can be found again; "
                    "free.",
                    "No free and no cached ones: sequences are preempted. See the two panels beside.",
                    [Query(total(KV, "state"), "{{state}}")],
                    Look.STACK,
                    runbook="PenstockKvCacheFull",
                ),
                Panel(
                    "KV cache in use, by worker",
                    "percentunit",
                    "The share of a worker's blocks that sequences hold.",
                    "Above 95 %: add workers, or lower `--max-num-seqs`. One alone: its sequences are long; new "
                    "requests go to the others.",
                    [Query(f"{total(KV, 'worker', 'state=used')} / {total(KV, 'worker')}", "{{worker}}")],
                    limits=(0.85, 0.95),
                    runbook="PenstockKvCacheFull",
                    board="worker",
                    is_share=True,
                ),
                Panel(
                    "Preemptions",
                    "ops",
                    "Sequences put back for want of KV blocks, a second over five minutes: each is computed again.",
                    "More than one now and then: the cache is too small for what runs at once.",
                    [Query(series("namespace:penstock_preemptions:rate5m"), "preemptions {{namespace}}")],
                    runbook="PenstockKvCacheFull",
                ),
                Panel(
                    "Prefix cache hits",
                    "percentunit",
                    "The share of prompts' tokens that was found in the cache and not computed, over five minutes.",
                    "A fall makes first tokens later: were workers replaced, are more tenants or longer prompts "
                    "there, do clients put changing text in front?",
                    [Query(series("namespace:penstock_prefix_cache_hits:ratio_rate5m"), "hits {{namespace}}")],
                    is_share=True,
                    runbook="PenstockFirstTokenBudgetBurn",
                ),
                Panel(
                    "Prompts: found and computed",
                    "short",
                    "Tokens of prompts a second: found in the prefix cache, and computed.",
                    "What is computed takes device time from those that decode; see the tokens of a step.",
                    [
                        Query(rate("penstock_cached_tokens_total"), "found"),
                        Query(
                            f"{rate('penstock_prompt_tokens_total')} - {rate('penstock_cached_tokens_total')}",
                            "computed",
                        ),
                    ],
                    Look.STACK,
                ),
                Panel(
                    "Tokens for nothing",
                    "percentunit",
                    "The share of sampled tokens of sequences that had ended or were preempted: the price of planning "
                    "ahead of results.",
                    "A few per cent are normal with short answers. More: preemptions, or many clients that leave.",
                    [
                        Query(
                            f"{rate('penstock_discarded_tokens_total')} / "
                            f"({rate('penstock_generated_tokens_total')} + {rate('penstock_discarded_tokens_total')})",
                            "discarded",
                        )
                    ],
                ),
            ],
        ),
        Row(
            "Steps",
            [
                Panel(
                    "Sequences of a step",
                    "short",
                    "How many sequences advance together.",
                    "At `--max-num-seqs` while requests wait: workers are full. Small while requests wait: KV blocks "
                    "or the log hold them back.",
                    quantiles("penstock_batch_sequences", 0.5, 0.95),
                    board="worker",
                ),
                Panel(
                    "Tokens of a step",
                    "short",
                    "Tokens that a step computes: one of each that decodes, and chunks of prompts.",
                    "p95 at `--max-num-batched-tokens`: long prompts fill steps and make everybody's tokens slower. "
                    "Bound them there.",
                    quantiles("penstock_step_tokens", 0.5, 0.95),
                    Look.LOGARITHMIC,
                    board="worker",
                ),
                Panel(
                    "Plans in flight",
                    "short",
                    "Plans sent to a worker and not answered.",
                    "0: the worker has nothing to do or no scheduler; at its most for long: its device hangs.",
                    [Query(largest("penstock_plans_in_flight", "worker"), "{{worker}}")],
                    runbook="PenstockNoProgress",
                    board="worker",
                ),
                Panel(
                    "Tokens sampled",
                    "short",
                    "Output tokens a second, as schedulers count them.",
                    "Compare with requests that wait: more waiting and fewer tokens means slower workers.",
                    [Query(rate("penstock_generated_tokens_total"), "tokens")],
                    board="worker",
                ),
                Panel(
                    "Ends by outcome",
                    "reqps",
                    "Requests that ended in schedulers, by outcome; stop strings are found later, by detokenizers.",
                    "Outcomes other than stop, length and cancelled: docs/api.md says whose fault each is.",
                    [Query(f"{rate('penstock_finished_requests_total', 'outcome')} > 0", "{{outcome}}")],
                    Look.STACK,
                    runbook="PenstockErrorBudgetBurn",
                    board="reliability",
                ),
                Panel(
                    "Held back by the log",
                    "short",
                    "The longest unread part of a shard's log.",
                    "Beyond `--max-log-backlog` (8192) no steps are planned for its requests: more detokenizers.",
                    [Query(series("namespace:penstock_log_backlog:max"), "entries {{namespace}}")],
                    limits=(8192,),
                    runbook="PenstockLogBacklog",
                    board="pipeline",
                ),
            ],
        ),
    ],
)
