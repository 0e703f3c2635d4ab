"""Models that requests began on and that no worker has."""

from collections.abc import Collection


class Absences:
    """Since when models are absent. While nobody has any model nothing is: then there is nobody to compare with."""

    def __init__(self, patience_ns: int) -> None:
        self._patience_ns = patience_ns
        self._since_ns: dict[bytes, int] = {}

    def note(self, wanted: Collection[bytes], present: Collection[bytes], now_ns: int) -> list[bytes]:
        """Return the models that have been absent for longer than patience lasts, others being present all the time.

        Args:
            wanted: digests of the models on which requests began.
            present: digests of the models that somebody has.
            now_ns: monotonic.
        """
        absent = [each for each in wanted if each not in present] if present else []
        self._since_ns = {each: self._since_ns.get(each, now_ns) for each in absent}
        return [each for each, since_ns in self._since_ns.items() if now_ns - since_ns >= self._patience_ns]
