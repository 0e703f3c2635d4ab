"""Capacity: room that is left, its bounds, and whose load it is."""

from tools.boards.panels import Board, Look, Panel, Row
from tools.boards.queries import OF_PROCESS, PROCESS, Query, largest, of_ours, rate, series, total

TENANT_TOKENS = "penstock_tenant_tokens_total"
PROCESS_CPU = series("process_cpu_seconds_total")

BOARD = Board(
    "capacity",
    "Capacity & tenants",
    "How much more fits, which resource runs out first, and whose requests they are. Autoscaling follows the same "
    "figures.",
    [
        Row(
            "What autoscaling looks at",
            [
                Panel(
                    "Requests that wait",
                    "short",
                    "Requests of the pool that wait for their first slot. Workers are scaled by it (16 for each, "
                    "unless values say otherwise).",
                    "It stays up and no worker comes: look at the ScaledObject and at free GPUs.",
                    [Query(series("namespace:penstock_waiting_requests:max"), "waiting {{namespace}}")],
                    runbook="PenstockQueueWait",
                ),
                Panel(
                    "Expected wait",
                    "s",
                    "Time in which all that waits would start at the rate of late.",
                    "Above a minute an alert fires. Bound what may wait with `--max-waiting-requests`, or add workers.",
                    [Query(series("namespace:penstock_expected_wait_seconds:max"), "wait {{namespace}}")],
                    limits=(5, 60),
                    runbook="PenstockQueueWait",
                ),
                Panel(
                    "KV cache in use",
                    "percentunit",
                    "The share of all workers' blocks that sequences hold; workers are added from 85 %.",
                    "High with few waiting: long sequences; workers with more memory, or a smaller `--max-model-len`.",
                    [Query(series("namespace:penstock_kv_usage:ratio"), "used {{namespace}}")],
                    limits=(0.85, 0.95),
                    runbook="PenstockKvCacheFull",
                    board="scheduler",
                    is_share=True,
                ),
                Panel(
                    "Processes alive",
                    "short",
                    "Processes of the pool by kind.",
                    "Fewer workers than the scaler wants: pods are pending, or still load weights.",
                    [
                        Query(
                            f"max by (kind) ({total('penstock_sessions', f'{PROCESS}, kind', 'state=alive')})",
                            "{{kind}}",
                        )
                    ],
                    board="reliability",
                ),
                Panel(
                    "Open streams by gateway",
                    "short",
                    "Requests being served, by gateway; gateways are scaled by it.",
                    "Uneven: a load balancer that keeps connections; HTTP/2 clients that never reconnect.",
                    [Query(total("penstock_open_streams", PROCESS), OF_PROCESS)],
                    Look.STACK,
                ),
                Panel(
                    "Refused requests",
                    "reqps",
                    "Requests a second that were refused before anything ran: too much waits, a key's limits, or what "
                    "callers sent is wrong.",
                    "More than callers' mistakes: raise limits or add workers.",
                    [Query(rate("penstock_requests_total", where="outcome=rejected"), "refused")],
                    runbook="PenstockQueueWait",
                ),
            ],
        ),
        Row(
            "Tenants",
            [
                Panel(
                    "Output tokens by tenant",
                    "short",
                    "Tokens a second handed to clients, of the ten tenants with most.",
                    "One has nearly all while others wait: `--scheduling-policy fair`, or limits of its keys.",
                    [Query(f"topk(10, {rate(TENANT_TOKENS, 'tenant', 'kind=output')})", "{{tenant}}")],
                    Look.STACK,
                ),
                Panel(
                    "Prompt tokens by tenant",
                    "short",
                    "Tokens a second of prompts, of the ten tenants with most.",
                    "Long prompts fill steps and delay everybody: `--max-waiting-tokens-per-tenant`, or `tpm` of keys.",
                    [Query(f"topk(10, {rate(TENANT_TOKENS, 'tenant', 'kind=prompt')})", "{{tenant}}")],
                    Look.STACK,
                ),
                Panel(
                    "Tokens of the last hour by tenant",
                    "short",
                    "Prompt and output tokens together, of the ten tenants with most.",
                    "It is what limits and weights should be compared with.",
                    [
                        Query(
                            f"topk(10, sum by (tenant) (increase({series(TENANT_TOKENS)}[1h])))",
                            "{{tenant}}",
                        )
                    ],
                    Look.GAUGE,
                ),
            ],
        ),
        Row(
            "What runs out first",
            [
                Panel(
                    "Devices busy",
                    "percentunit",
                    "The share of their time that all devices together spent on steps.",
                    "Near 100 % with requests waiting: more workers. A step that is half full takes nearly as long as "
                    "a full one, so see sequences of a step on *Scheduler & KV* too.",
                    [
                        # The mean of what each tells: a worker that is gone has no part in either.
                        Query(f"avg(rate({series('penstock_step_seconds_sum')}[$__rate_interval]))", "busy")
                    ],
                    board="worker",
                    is_share=True,
                ),
                Panel(
                    "Tokens for each worker",
                    "short",
                    "Output tokens a second handed out over five minutes, for each worker alive.",
                    "Plan with its highest value under load that keeps first tokens in time.",
                    [
                        Query(
                            f"{series('namespace:penstock_delivered_tokens:rate5m')} / on (namespace) "
                            f"(max by (namespace) ({series('penstock_sessions', 'kind=worker, state=alive')}) > 0)",
                            "tokens {{namespace}}",
                        )
                    ],
                    board="worker",
                ),
                Panel(
                    "Busiest process by hop",
                    "percentunit",
                    "The share of its time that the busiest process spends on a stream's messages.",
                    "Above 80 %: one more of that service; it then bounds the pool before devices do.",
                    [
                        Query(
                            f"max by (hop) ({rate('penstock_hop_work_seconds_sum', f'{PROCESS}, hop')})",
                            "{{hop}}",
                        )
                    ],
                    limits=(0.8,),
                    board="pipeline",
                ),
                Panel(
                    "Memory of Redis",
                    "bytes",
                    "Memory that Redis uses, and the bound beyond which it refuses writes (0: none).",
                    "Above 85 % of the bound: raise `valkey.maxmemory`, or bound what may wait.",
                    [
                        Query(largest("penstock_redis_used_memory_bytes"), "used"),
                        Query(largest("penstock_redis_max_memory_bytes"), "bound"),
                    ],
                    runbook="PenstockRedisMemory",
                ),
                Panel(
                    "Token log",
                    "bytes",
                    "Bytes of each shard's log, which a successor of its detokenizer would read.",
                    "It is compacted by itself. One that only grows: its detokenizer is too slow (*Pipeline*).",
                    [Query(largest("penstock_log_bytes", "shard"), "shard {{shard}}")],
                    Look.STACK,
                    board="pipeline",
                ),
                Panel(
                    "Busiest processes",
                    "percentunit",
                    "Cores that the eight busiest processes use: 100 % is one.",
                    "A service other than a worker near 100 %: one more of it, as each has one busy thread. Many at "
                    "once: the hosts have too few cores, or pods too low limits.",
                    [
                        Query(
                            f"topk(8, {of_ours(f'rate({PROCESS_CPU}[$__rate_interval])')})",
                            OF_PROCESS,
                        )
                    ],
                    Look.GAUGE,
                    board="pipeline",
                ),
            ],
        ),
    ],
)
