"""The stages through which a request comes to its first token, in their order."""

from tools.boards.panels import Look, Panel
from tools.boards.queries import Query, quantile


def _hop(name: str, what: str) -> tuple[str, str]:
    return f"penstock_hop_{what}_seconds", f"hop={name}"


# What the stage is called, the histogram and its labels.
STAGES: tuple[tuple[str, tuple[str, str]], ...] = (
    ("1 wait for a tokenizer", _hop("prompts", "wait")),
    ("2 tokenize", _hop("prompts", "work")),
    ("3 wait for a scheduler", _hop("requests", "wait")),
    ("4 wait for a slot", ("penstock_queue_time_seconds", "")),
    ("5 plan to worker", _hop("steps", "wait")),
    ("6 step on the device", ("penstock_step_seconds", "")),
    ("7 result to scheduler", _hop("results", "wait")),
    ("8 log to detokenizer", _hop("tokens", "wait")),
    ("9 make text", _hop("tokens", "work")),
    ("10 text to gateway", _hop("text", "wait")),
)


def stage_quantiles(level: float) -> list[Query]:
    """A quantile of each stage."""
    return [Query(quantile(level, histogram, where=where), name) for name, (histogram, where) in STAGES]


def slowest_stages(board: str = "") -> Panel:
    """The time of each stage now: the longest bar is the answer."""
    return Panel(
        "Where the time to the first token goes, p95 now",
        "s",
        "The 95th percentile of each stage on a request's way, in their order. Quantiles of stages do not add up to "
        "that of the whole.",
        "The longest bar is the cause. 1, 2: more tokenizers; 3: a scheduler is busy or gone; 4: more workers; 5 and "
        "6: the device is busy, which is well, or steps are too long; 7 to 10: Redis or that service is slow.",
        stage_quantiles(0.95),
        Look.GAUGE,
        runbook="PenstockFirstTokenBudgetBurn",
        board=board,
    )
