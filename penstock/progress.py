"""The progress bar of `LLM.generate`: finished requests, and how fast prompts are read and tokens are written."""

from types import TracebackType
from typing import Any

from tqdm import tqdm

from penstock.engine import Progress


class ProgressBar:
    """Shows the speed since it was opened.

    Prefill is prompt tokens per second of the steps that computed prompts, decode is sampled tokens per second of the
    steps that sampled.

    Args:
        progress: what the engine counts.
        total: requests.
        disable: shows nothing.
    """

    def __init__(self, progress: Progress, total: int, *, disable: bool) -> None:
        self._progress = progress
        self._before = progress.copy()
        self._bar: Any = tqdm(total=total, desc="Requests", unit="req", disable=disable, dynamic_ncols=True)

    def __enter__(self) -> "ProgressBar":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._bar.close()

    def show(self, num_finished: int) -> None:
        """Draws, if it is time to."""
        if self._bar.disable:
            return
        now, before = self._progress, self._before
        prefill = _rate(now.num_prefill_tokens - before.num_prefill_tokens, now.prefill_s - before.prefill_s)
        decode = _rate(now.num_decode_tokens - before.num_decode_tokens, now.decode_s - before.decode_s)
        self._bar.set_postfix_str(f"prefill {prefill} tok/s, decode {decode} tok/s", refresh=False)
        self._bar.update(num_finished - self._bar.n)


def _rate(count: int, seconds: float) -> str:
    return f"{count / seconds:,.0f}" if seconds > 0 else "–"
