"""The time at which the next plan of a worker is made: as late as its device allows.

A request that comes after a plan was made waits for that whole step. So the next plan is made when what is in flight is
about to end: at its predicted end, less the time that a plan needs to reach the device. Both are learned from results:
how long steps take, and how long each plan had been waiting for the device when the step before it ended. When a result
comes tells less of when its step ended than the device's own times do: it waits wherever somebody is busy.
"""

from collections import deque
from dataclasses import dataclass, field

from contract.domain.plan import U32

_LEAST_STEP_NS = 3_000_000  # shorter steps leave no time to wait: they are not even looked at
_MARGIN_NS = 250_000
_NUM_STEPS = 128  # that are remembered
_FEWEST_STEPS = 8  # before so many are known, plans are made at once
_NUM_LATE = 3  # of the remembered steps that may have needed more time than is left to the next
_NUM_RESULTS = 16  # that are remembered, of which the soonest tells when the others would have come
_MOST_LATE_NS = 5_000_000  # after the soonest: two in a row tell of time that the device does not tell of
_LONG_IDLE_NS = 1_000_000_000  # in which the device's clock may have come away from this process's


@dataclass(frozen=True, slots=True)
class _InFlight:
    """A plan whose result has not come."""

    step: int
    issued_ns: int
    num_prompt_tokens: int = 0
    num_decodes: int = 0
    expected_ns: int = 0  # end of the steps before it, as predicted when it was made; 0: there was none, or nobody knew
    is_plain: bool = False  # the steps before it only decode
    is_looked_at: bool = True  # else nothing but its number and its time is known


@dataclass(slots=True)
class _Durations:
    """Durations of steps: the least of the last few that are alike, so that no prediction is late for long."""

    plain_ns: deque[int] = field(default_factory=lambda: deque(maxlen=4))
    per_token_ns: deque[tuple[int, float]] = field(
        default_factory=lambda: deque(maxlen=32)
    )  # prompt tokens, ns of each

    def observe(self, step: _InFlight, step_ns: int) -> None:
        if not step.num_prompt_tokens:
            self.plain_ns.append(step_ns)
        else:
            # What a step with prompts takes beside its tokens is that of one that only decodes.
            besides_ns = min(self.plain_ns, default=0) if step.num_decodes else 0
            num_tokens = step.num_prompt_tokens
            self.per_token_ns.append((num_tokens, max(0, step_ns - besides_ns) / num_tokens))

    def predict(self, step: _InFlight) -> int | None:
        """Nanoseconds; None: no such step is known."""
        plain_ns = min(self.plain_ns, default=None)
        if not step.is_looked_at or not step.num_prompt_tokens:
            return plain_ns
        if not self.per_token_ns:
            return None
        besides_ns = (plain_ns or 0) if step.num_decodes else 0
        # A few tokens are nearly free, since weights are read for them anyhow: they tell nothing about many.
        of_many = [each_ns for num_tokens, each_ns in self.per_token_ns if 2 * num_tokens >= step.num_prompt_tokens]
        least_ns = min(of_many or (each_ns for _, each_ns in self.per_token_ns))
        return besides_ns + int(least_ns * step.num_prompt_tokens)


class _Lead:
    """Time between the making of a plan and the predicted end of the steps before it."""

    def __init__(self) -> None:
        self._needed_ns = deque[int](maxlen=_NUM_STEPS)
        self.ns: int | None = None  # None: too little is known

    def observe(self, needed_ns: int) -> None:
        """So long before the predicted end a plan had to be made, so that the device did not wait for it."""
        self._needed_ns.append(needed_ns)
        if len(self._needed_ns) >= _FEWEST_STEPS:
            # Of few, too, one is left out: the first predictions may be far off.
            num_late = max(1, _NUM_LATE * len(self._needed_ns) // _NUM_STEPS)
            # Less than nothing would leave no plan in flight when the next is made, and nothing would be learned more.
            self.ns = max(0, sorted(self._needed_ns)[-1 - num_late]) + _MARGIN_NS


class _Results:
    """When results come that come at once: by the device's own times, for they come late whenever somebody is busy."""

    def __init__(self) -> None:
        self._device_ns = 0  # the end of the last step by the device's times
        self._after_ns = deque[int](maxlen=_NUM_RESULTS)  # so long after it the result came, by another clock

    def observe(self, step_ns: int, idle_ns: int, now_ns: int) -> int:
        """When the result of this step would have come, `now_ns` or earlier, had it come as soon as others."""
        self._device_ns += idle_ns + step_ns
        after_ns = now_ns - self._device_ns
        known_ns = self._after_ns
        is_other = bool(known_ns) and min(known_ns[-1], after_ns) - min(known_ns) > _MOST_LATE_NS
        if is_other or idle_ns > _LONG_IDLE_NS:
            known_ns.clear()
        known_ns.append(after_ns)
        return self._device_ns + min(known_ns)


class Pacing:
    """The plans in flight of one worker in one epoch; times are monotonic nanoseconds."""

    def __init__(self) -> None:
        self._in_flight: deque[_InFlight] = deque()
        self._durations = _Durations()
        self._leads = {is_plain: _Lead() for is_plain in (False, True)}  # by whether the steps before only decode
        self._results = _Results()
        self._answered_ns = 0  # when the last result came, or would have come, had nobody been busy
        self._is_short = True  # the last step

    def issue(self, step: int, num_tokens: U32, now_ns: int) -> None:
        """A plan was made; `num_tokens` u32[sequences]: by so many each advances."""
        if self._is_short:
            self._in_flight.append(_InFlight(step, now_ns, is_looked_at=False))
            return
        chunks = num_tokens[num_tokens > 1]
        expected_ns, is_plain = self._expected_ns() or 0, self._only_decodes()
        num_prompt_tokens, num_decodes = int(chunks.sum()), len(num_tokens) - len(chunks)
        self._in_flight.append(_InFlight(step, now_ns, num_prompt_tokens, num_decodes, expected_ns, is_plain))

    def answer(self, step: int, step_ns: int, idle_ns: int, slack_ns: int, now_ns: int) -> None:
        """A result came.

        Args:
            step: its plan.
            step_ns: device time of the step.
            idle_ns: device time between the end of the step before and its beginning.
            slack_ns: how long its plan had been ready for the device when the step before it ended; below 0 the device
                waited for it.
            now_ns: when the result came.
        """
        if not self._in_flight or self._in_flight[0].step != step:
            return
        answered = self._in_flight.popleft()
        self._answered_ns = self._results.observe(step_ns, idle_ns, now_ns)
        self._is_short = step_ns < _LEAST_STEP_NS
        if self._is_short or not answered.is_looked_at:
            return
        self._durations.observe(answered, step_ns)
        if answered.expected_ns:
            self._leads[answered.is_plain].observe(answered.expected_ns - answered.issued_ns - slack_ns)

    def due_ns(self, now_ns: int) -> int:
        """The time at which the next plan is to be made; `now_ns` or earlier: now."""
        if self._is_short:
            return now_ns
        lead_ns, expected_ns = self._leads[self._only_decodes()].ns, self._expected_ns()
        return now_ns if lead_ns is None or expected_ns is None else expected_ns - lead_ns

    def _only_decodes(self) -> bool:
        return not any(each.num_prompt_tokens for each in self._in_flight)

    def _expected_ns(self) -> int | None:
        """The predicted end of what is in flight; None: nothing is, or nobody knows."""
        if not self._in_flight:
            return None
        end_ns = max(self._answered_ns, self._in_flight[0].issued_ns)
        for step in self._in_flight:
            predicted_ns = self._durations.predict(step)
            if predicted_ns is None:
                return None
            end_ns += predicted_ns
        return end_ns
