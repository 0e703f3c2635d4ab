"""A gateway's report to a server that was restarted: the requests that it serves, and the tokens of their clients."""

import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace

from gateway_svc.call import Served
from servicekit.bus.calls import Cancel, KeepPromptOutput, Submit

REMEMBERED_S = 5.0  # what was older when the server last answered has reached its disk


class Witness:
    """Remembers what was told to clients or to the server so lately that the server may have lost it."""

    def __init__(self, heard_s: Callable[[], float]) -> None:
        """`heard_s` tells when the server last answered, in monotonic seconds: later nothing reaches its disk."""
        self._heard_s = heard_s
        self._ended: deque[tuple[float, Served]] = deque()
        self._cancelled: deque[tuple[float, Cancel]] = deque()

    def end(self, served: Served) -> None:
        """A request is served no more; if its client has the whole of it, that is remembered for a while."""
        if served.stream.is_whole:
            self._remember(served)

    def give_up(self, served: Served) -> None:
        """A request is to be cancelled: if it has to be made again, then so that it ends like that."""
        if served.call.is_submitted:
            self._remember(served)

    def _remember(self, served: Served) -> None:
        self.forget()
        if served.submission is not None:
            self._ended.append((time.monotonic(), served))

    def cancel(self, cancels: Iterable[Cancel]) -> None:
        """These were sent."""
        self.forget()
        now_s = time.monotonic()
        self._cancelled.extend((now_s, each) for each in cancels)

    def forget(self) -> None:
        """Lets go of what the server has on its disk."""
        oldest_s = self._heard_s() - REMEMBERED_S
        for remembered in (self._ended, self._cancelled):
            while remembered and remembered[0][0] < oldest_s:
                remembered.popleft()

    def restart_calls(self, served: Iterable[Served], route: bytes) -> list[Submit | KeepPromptOutput | Cancel]:
        """Make the pool know again what it may have forgotten.

        A request whose client has all of it is among that: it may have risen again without its end, and must end in the
        same way. So is one that was cancelled, with its cancel; it would otherwise go on for nobody.

        Args:
            served: the requests that are being served.
            route: the gateway session that gets their text.
        """
        self.forget()
        now_ns = time.time_ns()
        several = [each for each in served if each.call.is_submitted]
        several += [each for _, each in self._ended]
        submissions = [submission for each in several if (submission := _submission(each)) is not None]
        return [
            *(replace(each, route=route, sent_ns=now_ns) for each in submissions),
            *(each.prompt_output for each in several if each.prompt_output is not None),
            *(cancel for _, cancel in self._cancelled),
        ]


def _submission(served: Served) -> Submit | None:
    """The submit of a request again, with what its client has; None if it was submitted by another gateway."""
    return (
        None
        if served.submission is None
        else replace(
            served.submission,
            routed_ms=served.call.came_ms,
            witness=served.stream.witness(),
            model_digest=served.model_digest,
        )
    )
