"""Losses, the time until requests went on, and anything that was wrong with what came back."""

from tools.boards.panels import Board, Look, Panel, Row
from tools.boards.queries import (
    OF_PROCESS,
    PROCESS,
    RARE,
    Query,
    events,
    largest,
    quantile,
    rate,
    series,
    starts,
    total,
)

BOARD = Board(
    "reliability",
    "Reliability",
    "What died, what was taken over and how fast, what clients saw of it, and how Redis is.",
    [
        Row(
            "What clients see",
            [
                Panel(
                    "Errors, over several windows",
                    "percentunit",
                    "The share of answered requests that failed and not by their caller's fault. The objective is 0.1 "
                    "%; 1.44 % for an hour uses up a month's errors in two days.",
                    "What died in these minutes is below; errors in the logs name requests.",
                    [
                        Query(series(f"namespace:penstock_errors:ratio_rate{each}"), f"{each} {{{{namespace}}}}")
                        for each in ("5m", "1h", "6h")
                    ],
                    limits=(0.006, 0.0144),
                    runbook="PenstockErrorBudgetBurn",
                ),
                Panel(
                    "Requests that fail",
                    "reqps",
                    "Requests a second that ended with an error, were refused, or were cancelled by their clients.",
                    "error: look below. rejected: *Capacity & tenants*. cancelled by many at once: clients' "
                    "time-outs, so look at first tokens.",
                    [
                        Query(
                            rate("penstock_requests_total", "outcome", "outcome=~error|rejected|cancelled"),
                            "{{outcome}}",
                        )
                    ],
                    runbook="PenstockErrorBudgetBurn",
                    board="overview",
                ),
                Panel(
                    "Broken connections mended",
                    "short",
                    "In five minutes: clients that came back to a request, text asked for again (also for requests "
                    "that are silent for long because they wait), readers too slow for their text, requests cancelled "
                    "as their gateway died and did not come back.",
                    "Clients that come back without deaths below: something between clients and gateways cuts "
                    "connections.",
                    [
                        Query(events("penstock_resumes_total"), "clients came back"),
                        Query(events("penstock_text_refetches_total"), "text asked for again"),
                        Query(events("penstock_slow_clients_total"), "slow readers"),
                        Query(events("penstock_orphaned_requests_total"), "requests of a lost gateway"),
                    ],
                    Look.BARS,
                ),
            ],
        ),
        Row(
            "What was lost and taken over",
            [
                Panel(
                    "Processes alive",
                    "short",
                    "Processes of the pool by kind, as gateways know them.",
                    "A kind at 0: nothing passes it; requests wait, none is lost.",
                    [
                        Query(
                            f"max by (kind) ({total('penstock_sessions', f'{PROCESS}, kind', 'state=alive')})",
                            "{{kind}}",
                        )
                    ],
                    runbook="PenstockMetricsAbsent",
                ),
                Panel(
                    "Processes draining or dead",
                    "short",
                    "draining: they finish what they hold; dead: their lease ran out. They are told for a minute "
                    "after.",
                    "dead without a deployment: the end of that process's log, and the node's events.",
                    [
                        Query(
                            f"max by (kind, state) "
                            f"({total('penstock_sessions', f'{PROCESS}, kind, state', 'state=~dead|draining')}) > 0 "
                            f"or max({series('penstock_sessions', 'state=dead')})",
                            "{{kind}} {{state}}",
                        )
                    ],
                ),
                Panel(
                    "Time until requests went on, p95",
                    "s",
                    "From the last sign of life of what was lost until its requests went on.",
                    "A lease of 1.5 s is most of it. Longer: there was no other process that could take over.",
                    [Query(quantile(0.95, "penstock_recovery_seconds", "lost", window=RARE), "{{lost}}")],
                ),
                Panel(
                    "Losses overcome",
                    "short",
                    "Processes that were lost and whose requests, or shards of the log, others took over in five "
                    "minutes.",
                    "Without a deployment: which process died, and why? A request that kills workers ends after it has "
                    "done so alone, twice.",
                    [Query(events("penstock_recovery_seconds_count", "lost"), "{{lost}}")],
                    Look.BARS,
                ),
                Panel(
                    "Sessions lost",
                    "short",
                    "Times in five minutes that processes lost their hold on the pool: unreachable: Redis was gone or "
                    "silent; suspended: it was restarted; fenced: a lease had run out.",
                    "A scheduler that has no worker left begins anew and counts too. fenced alone: processes stand "
                    "still for longer than `--session-ttl-s`: CPU limits, paused nodes.",
                    [Query(events("penstock_session_losses_total", "reason"), "{{reason}}")],
                    Look.BARS,
                    runbook="PenstockLeaseFlapping",
                ),
                Panel(
                    "Shards of the log",
                    "short",
                    "In five minutes: shards taken and rebuilt, leases lost while reading, prompts taken from "
                    "tokenizers that died.",
                    "Rebuilt at each deployment. Lost again and again: detokenizers stand still or are too few.",
                    [
                        Query(events("penstock_shard_rebuilds_total"), "shards rebuilt"),
                        Query(events("penstock_shard_losses_total"), "leases lost"),
                        Query(events("penstock_tokenizer_reclaimed_prompts_total"), "prompts taken over"),
                    ],
                    Look.BARS,
                    runbook="PenstockLeaseFlapping",
                ),
                Panel(
                    "Messages that could not be read",
                    "short",
                    "Messages put into the stream `dead` in five minutes, by the stream that they came from.",
                    "Two versions that should not share a pool, or somebody else writes to the server. The runbook "
                    "reads them.",
                    [Query(events("penstock_dead_letters_total", "stream"), "{{stream}}")],
                    Look.BARS,
                    limits=(1,),
                    runbook="PenstockDeadLetters",
                ),
                Panel(
                    "Rows that did not fit",
                    "short",
                    "Rows of the log that did not extend a sequence, in five minutes, by reason.",
                    "After a take-over the log is read again, so duplicate, ended and unknown are normal then. "
                    "mismatch never is: keep the logs and report it.",
                    [Query(events("penstock_rejected_rows_total", "reason"), "{{reason}}")],
                    Look.BARS,
                ),
                Panel(
                    "Processes started",
                    "short",
                    "Starts of processes in the last five minutes, by the process.",
                    "Again and again: it dies or its probe fails; the end of its log says why.",
                    [Query(starts(PROCESS), OF_PROCESS)],
                    Look.BARS,
                ),
            ],
        ),
        Row(
            "Redis",
            [
                Panel(
                    "Processes without Redis",
                    "short",
                    "Processes that have no connection to Redis or no active session.",
                    "One: its network, its password. All: the server. Streams pause and go on.",
                    [Query(f"sum(1 - {series('penstock_bus_up')})", "processes")],
                    limits=(1,),
                    runbook="PenstockRedisUnreachable",
                ),
                Panel(
                    "Time until Redis's answer, p99",
                    "s",
                    "Of all calls, over five minutes.",
                    "Above 0.1 s: a slow disk with `appendfsync always`, forks of a large memory, other tenants.",
                    [Query(series("namespace:penstock_bus_call_seconds:p99_rate5m"), "p99 {{namespace}}")],
                    limits=(0.1,),
                    runbook="PenstockRedisSlow",
                    board="pipeline",
                ),
                Panel(
                    "Writes to disk",
                    "none",
                    "1: the last append, rewrite and snapshot succeeded; and whether an append-only file is kept at "
                    "all.",
                    "0 of the first: the disk is full or broken, and a restart would lose what was written since.",
                    [
                        Query(f"min({series('penstock_redis_persistence_ok')})", "succeeded"),
                        Query(f"min({series('penstock_redis_persists')})", "append-only file kept"),
                    ],
                    runbook="PenstockRedisPersistence",
                    is_share=True,
                ),
                Panel(
                    "Memory of Redis",
                    "bytes",
                    "Memory that Redis uses, and the bound beyond which it refuses writes (0: none).",
                    "Above 85 %: the runbook. What grows: logs whose detokenizer is away, results, waiting prompts.",
                    [
                        Query(largest("penstock_redis_used_memory_bytes"), "used"),
                        Query(largest("penstock_redis_max_memory_bytes"), "bound"),
                    ],
                    runbook="PenstockRedisMemory",
                    board="capacity",
                ),
                Panel(
                    "Time to learn who is there, p99",
                    "s",
                    "How long a gateway's survey of the pool takes.",
                    "It grows with changes, not with the pool: seconds mean a slow server or a busy gateway.",
                    [Query(quantile(0.99, "penstock_survey_seconds"), "survey")],
                ),
                Panel(
                    "Alerts that fire",
                    "short",
                    "Alerts of Penstock by name.",
                    "Each has a page of its name in docs/runbooks.",
                    [
                        Query(
                            f"count by (alertname) ({series('ALERTS', 'alertname=~Penstock.*, alertstate=firing')}) "
                            'or label_replace(vector(0), "alertname", "none", "", "")',
                            "{{alertname}}",
                        )
                    ],
                    Look.BARS,
                    runbook="PenstockNoProgress",
                ),
            ],
        ),
    ],
)
