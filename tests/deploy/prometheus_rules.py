"""The chart's files/prometheus-rules.yaml as data, and what each alert is shown: series under which it fires, and not.

Series are written as `promtool test rules` reads them, a value a minute: `0+60x30` is 31 of them, 60 more each.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

RULES = Path(__file__).parents[2] / "deploy" / "helm" / "penstock" / "files" / "prometheus-rules.yaml"
RUNBOOKS = Path(__file__).parents[2] / "docs" / "runbooks"
_FIRST_TOKENS = "penstock_time_to_first_token_seconds"
# What every service tells all the time: nothing is absent.
PRESENT = {
    "penstock_open_streams": "0x600",
    "penstock_tokenizer_prompts_total": "0x600",
    "penstock_sequences": "0x600",
    "penstock_leased_shards": "0x600",
}


@dataclass(frozen=True)
class Case:
    """One alert, and two pools: it fires in one after so many minutes, and never in the other."""

    alert: str
    fires: dict[str, str]
    quiet: dict[str, str]
    at_minute: int
    severity: str = "warning"
    labels: dict[str, str] = field(default_factory=dict)  # of the alert that fires


def _answers(stop: str, error: str) -> dict[str, str]:
    return {'penstock_requests_total{outcome="stop"}': stop, 'penstock_requests_total{outcome="error"}': error}


def _first_tokens(soon: str, late: str) -> dict[str, str]:
    return {f'{_FIRST_TOKENS}_bucket{{le="2.5"}}': soon, f"{_FIRST_TOKENS}_count": late}


def _kv(used: str, free: str, preempted: str) -> dict[str, str]:
    return {
        'penstock_kv_blocks{worker="w",state="used"}': used,
        'penstock_kv_blocks{worker="w",state="free"}': free,
        "penstock_preemptions_total": preempted,
    }


CASES = (
    Case("PenstockErrorBudgetBurn", _answers("0+98x90", "0+2x90"), _answers("0+999x90", "0+1x90"), 80, "critical"),
    # A burst of a minute: the long window says that it is no trend.
    Case("PenstockErrorBudgetBurn", _answers("0+98x90", "0+2x90"), _answers("0+98x90", "0x40 60x50"), 80, "critical"),
    Case("PenstockErrorBudgetBurn", _answers("0+992x400", "0+8x400"), _answers("0+999x400", "0+1x400"), 390),
    Case(
        "PenstockFirstTokenBudgetBurn",
        _first_tokens("0+1x90", "0+10x90"),
        _first_tokens("0+9x90", "0+10x90"),
        80,
        "critical",
    ),
    Case(
        "PenstockFirstTokenBudgetBurn", _first_tokens("0+6x400", "0+10x400"), _first_tokens("0+9x400", "0+10x400"), 390
    ),
    Case(
        "PenstockNoProgress",
        {"penstock_open_streams": "4x60", "penstock_delivered_tokens_total": "0+60x20 1200x40"},
        {"penstock_open_streams": "4x60", "penstock_delivered_tokens_total": "0+60x60"},
        40,
        "critical",
    ),
    Case(
        "PenstockNoProgress",
        {"penstock_open_streams": "4x60", "penstock_delivered_tokens_total": "0x60"},
        {"penstock_open_streams": "0x60", "penstock_delivered_tokens_total": "0x60"},  # nobody asks for anything
        40,
        "critical",
    ),
    Case(
        "PenstockQueueWait",
        {"penstock_expected_wait_seconds": "90x30"},
        {"penstock_expected_wait_seconds": "20x30"},
        20,
    ),
    # Every gateway tells the pool's: no sum of three.
    Case(
        "PenstockQueueWait",
        {f'penstock_expected_wait_seconds{{instance="{name}"}}': "70x30" for name in "abc"},
        {f'penstock_expected_wait_seconds{{instance="{name}"}}': "50x30" for name in "abc"},
        20,
    ),
    Case("PenstockKvCacheFull", _kv("97x30", "3x30", "0+6x30"), _kv("97x30", "3x30", "5x30"), 25),
    Case("PenstockKvCacheFull", _kv("97x30", "3x30", "0+6x30"), _kv("60x30", "40x30", "0+6x30"), 25),
    Case(
        "PenstockLogBacklog",
        {'penstock_log_backlog{shard="1"}': "9000x20"},
        {'penstock_log_backlog{shard="1"}': "900x20"},
        15,
    ),
    Case(
        "PenstockDeadLetters",
        {'penstock_dead_letters_total{stream="prompts"}': "0x10 2x20"},
        {'penstock_dead_letters_total{stream="prompts"}': "2x30"},  # long ago
        15,
        labels={"stream": "prompts"},
    ),
    Case(
        "PenstockLeaseFlapping",
        {'penstock_session_losses_total{instance="a",reason="fenced"}': "0+1x30"},
        {'penstock_session_losses_total{instance="a",reason="fenced"}': "0x10 1x20"},  # once: a process was paused
        25,
        labels={"instance": "a"},
    ),
    Case(
        "PenstockShardsLost",
        {"penstock_shard_losses_total": "0+1x30"},
        {"penstock_shard_losses_total": "0x10 1x20"},
        25,
    ),
    Case(
        "PenstockRedisUnreachable",
        {'penstock_bus_up{instance="a"}': "1x10 0x10"},
        {'penstock_bus_up{instance="a"}': "1x10 0 1x10"},
        15,
        "critical",
        {"instance": "a"},
    ),
    Case(
        "PenstockRedisSlow",
        {
            'penstock_bus_call_seconds_bucket{call="commit",le="0.1"}': "0+90x40",
            'penstock_bus_call_seconds_bucket{call="commit",le="0.25"}': "0+100x40",
            'penstock_bus_call_seconds_bucket{call="commit",le="+Inf"}': "0+100x40",
        },
        {
            'penstock_bus_call_seconds_bucket{call="commit",le="0.1"}': "0+100x40",
            'penstock_bus_call_seconds_bucket{call="commit",le="0.25"}': "0+100x40",
            'penstock_bus_call_seconds_bucket{call="commit",le="+Inf"}': "0+100x40",
        },
        35,
    ),
    Case(
        "PenstockRedisMemory",
        {"penstock_redis_used_memory_bytes": "9e9x20", "penstock_redis_max_memory_bytes": "1e10x20"},
        {"penstock_redis_used_memory_bytes": "9e9x20", "penstock_redis_max_memory_bytes": "0x20"},  # no bound
        15,
    ),
    Case(
        "PenstockRedisPersistence",
        {"penstock_redis_persistence_ok": "1x5 0x15"},
        {"penstock_redis_persistence_ok": "1x20"},
        15,
        "critical",
    ),
    Case(
        "PenstockMetricsAbsent",
        {"penstock_sequences": "0x5 _x600", "penstock_leased_shards": "0x600"},
        {},
        30,
        "critical",
        {"service": "scheduler"},
    ),
)


def groups() -> list[dict[str, Any]]:
    """The content of the file."""
    found: list[dict[str, Any]] = yaml.safe_load(RULES.read_text())["groups"]
    return found


def alerts() -> list[dict[str, Any]]:
    """The alerts of all groups."""
    return [rule for group in groups() for rule in group["rules"] if "alert" in rule]


def recorded() -> list[dict[str, Any]]:
    """The recording rules of all groups."""
    return [rule for group in groups() for rule in group["rules"] if "record" in rule]
