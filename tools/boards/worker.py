"""Devices: steps, idle time, requests that wait for them."""

from tools.boards.panels import Board, Look, Panel, Row
from tools.boards.queries import OF_PROCESS, PROCESS, Query, events, quantile, quantiles, rate, series, total

STEP = "penstock_step_seconds"
# Processes that have devices: Python's own figures do not say what a process is.
_IS_WORKER = f"and on ({PROCESS}) {series('penstock_plans_queued')}"

BOARD = Board(
    "worker",
    "Worker",
    "Is the device the bottleneck: how long its steps are, how long it waits for the next one.",
    [
        Row(
            "Steps on the device",
            [
                Panel(
                    "Device time of a step",
                    "s",
                    "All workers together. A step gives each decoding sequence a token: it bounds the time between "
                    "tokens.",
                    "It grows with sequences, their length and chunks of prompts: bound `--max-num-batched-tokens`, or "
                    "add workers.",
                    quantiles(STEP),
                    board="scheduler",
                ),
                Panel(
                    "Device time of a step by worker, p95",
                    "s",
                    "The same for each worker.",
                    "One is slower than others of its kind: its clock is throttled, or something else uses its GPU.",
                    [Query(quantile(0.95, STEP, PROCESS), OF_PROCESS)],
                ),
                Panel(
                    "Steps",
                    "ops",
                    "Steps a second, by worker.",
                    "0 while plans are queued: the device hangs; after `--step-timeout-s` the worker ends by itself.",
                    [Query(rate(f"{STEP}_count", PROCESS), OF_PROCESS)],
                    runbook="PenstockNoProgress",
                ),
                Panel(
                    "Device busy",
                    "percentunit",
                    "The share of its time that a device spent on steps.",
                    "Near 100 % while requests wait: add workers. Low while they wait: see the idle time beside.",
                    [Query(rate(f"{STEP}_sum", PROCESS), OF_PROCESS)],
                    board="capacity",
                    is_share=True,
                ),
                Panel(
                    "Device idle between steps",
                    "percentunit",
                    "The share of its time that a device had nothing to do although steps followed each other.",
                    "More than a few per cent under load: plans come late. See plans queued, the hop `steps`, and "
                    "whether the scheduler's core is shared.",
                    [Query(rate("penstock_device_idle_seconds_total", PROCESS), OF_PROCESS)],
                    board="pipeline",
                    is_share=True,
                ),
                Panel(
                    "Tokens sampled",
                    "short",
                    "Tokens a second, by worker.",
                    "Uneven: requests differ in length, or a worker came back a moment ago and fills up.",
                    [Query(rate("penstock_sampled_tokens_total", PROCESS), OF_PROCESS)],
                    Look.STACK,
                ),
            ],
        ),
        Row(
            "What the device has before it",
            [
                Panel(
                    "Plans queued",
                    "short",
                    "Plans that a worker has read and not launched yet.",
                    "0 under load: the device may run dry. Growing: the device is slower than planned for.",
                    [Query(total("penstock_plans_queued", PROCESS), OF_PROCESS)],
                    board="scheduler",
                ),
                Panel(
                    "Plan to worker, p95",
                    "s",
                    "From sending a plan to receiving it.",
                    "Milliseconds: Redis, the network, or the worker's host is short of CPU.",
                    [Query(quantile(0.95, "penstock_hop_wait_seconds", PROCESS, "hop=steps"), OF_PROCESS)],
                    board="pipeline",
                ),
                Panel(
                    "Launching a plan, p95",
                    "s",
                    "Time in which a worker makes a plan into work of the device.",
                    "Longer than a step: the host bounds the device; give the pod more CPU, keep CUDA graphs on.",
                    [Query(quantile(0.95, "penstock_hop_work_seconds", PROCESS, "hop=steps"), OF_PROCESS)],
                ),
            ],
        ),
        Row(
            "Processes",
            [
                Panel(
                    "CPU",
                    "percentunit",
                    "Cores that a worker's process uses: 100 % is one.",
                    "One core all the time is normal while it launches. At its limit: raise the pod's CPU.",
                    [Query(f"rate({series('process_cpu_seconds_total')}[$__rate_interval]) {_IS_WORKER}", OF_PROCESS)],
                ),
                Panel(
                    "Memory of the host",
                    "bytes",
                    "Resident memory of a worker's process. GPU memory is planned when it starts and does not change.",
                    "It grows for hours: a leak; keep the logs, restart the worker, and report it.",
                    [Query(f"{series('process_resident_memory_bytes')} {_IS_WORKER}", OF_PROCESS)],
                ),
                Panel(
                    "Pairings begun",
                    "short",
                    "Times in five minutes that a worker began with a scheduler.",
                    "Again and again: its steps fail or its lease is lost; its log says why.",
                    [Query(events("penstock_pairings_total", PROCESS), OF_PROCESS)],
                    Look.BARS,
                    runbook="PenstockLeaseFlapping",
                    board="reliability",
                ),
            ],
        ),
        Row(
            "What runs",
            [
                Panel(
                    "Models",
                    "none",
                    "What is served: name (gateways say what clients call it, workers what they loaded), digest of "
                    "the weights and Penstock's version.",
                    "Two digests: a model is being replaced, and requests go on with the one that they began on. Two "
                    "versions: a deployment is under way, or has stopped half-way.",
                    [
                        Query(
                            f"count by (namespace, model, digest, version) ({series('penstock_model_info')})",
                            "{{model}} {{digest}}",
                        )
                    ],
                    Look.TABLE,
                ),
                Panel(
                    "Kernels",
                    "none",
                    "Whose kernels each worker computes with.",
                    "A worker that differs from others of its kind lacks a package or has another GPU, and may be "
                    "slower.",
                    [
                        Query(
                            f"count by ({PROCESS}, attention) ({series('penstock_worker_info')})",
                            "{{process}} {{attention}}",
                        )
                    ],
                    Look.TABLE,
                ),
            ],
            height=5,
            columns=2,
        ),
    ],
)
