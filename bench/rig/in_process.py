"""`LLM` on the rows of `bench.gpu`, in a process of its own.

Answers, one line each: the start; each row's seconds by round; lines of the profile.
"""

import logging
import time

_BEGAN_S = time.perf_counter()

from typing import Any  # noqa: E402

from bench.rig.children import answer, request  # noqa: E402
from penstock import LLM, SamplingParams  # noqa: E402


class Phases(logging.Handler):
    """Keeps what loading says of its phases."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.found: dict[str, Any] = {}

    def emit(self, record: logging.LogRecord) -> None:
        """Takes what has a duration or is about memory."""
        for name in ("seconds", "memory"):
            if hasattr(record, name):
                self.found[record.getMessage()] = getattr(record, name)


def run(llm: LLM, work: dict[str, Any]) -> float:
    """Seconds for all of it; with one at once, one call for each."""
    inputs = work["texts"] or [{"prompt_token_ids": ids} for ids in work["prompts"]]
    params = [
        SamplingParams(temperature=work["temperature"], ignore_eos=True, max_tokens=num) for num in work["num_tokens"]
    ]
    group = 1 if work["at_once"] == 1 else len(inputs)
    began_s = time.perf_counter()
    if work["pools"]:
        assert len(llm.embed(inputs, use_tqdm=False)) == len(inputs)
        return time.perf_counter() - began_s
    for first in range(0, len(inputs), group):
        outputs = llm.generate(inputs[first : first + group], params[first : first + group], use_tqdm=False)
        for output, each in zip(outputs, params[first : first + group], strict=True):
            assert len(output.outputs[0].token_ids) == each.max_tokens
    return time.perf_counter() - began_s


def main() -> None:
    asked = request()
    logger, phases = logging.getLogger("worker_svc"), Phases()
    logger.setLevel(logging.INFO)
    logger.addHandler(phases)
    imported_s = time.perf_counter() - _BEGAN_S
    llm = LLM(asked["model"], **asked["options"])
    ready_s = time.perf_counter() - _BEGAN_S
    llm.generate([{"prompt_token_ids": [1] * 10}], SamplingParams(max_tokens=8, ignore_eos=True), use_tqdm=False)
    answer(imported_s=imported_s, ready_s=ready_s, first_s=time.perf_counter() - _BEGAN_S, phases=phases.found)
    for work in asked["works"]:
        answer(row=work["name"], seconds=[run(llm, work) for _ in range(work["num_rounds"])])
    for batch in asked["profiled"]:
        from bench.rig.step_profile import profile_decode  # noqa: PLC0415  (torch: a simulated runner does without)

        answer(profile=profile_decode(llm, batch))
    if asked["profiled"]:
        from bench.rig.step_profile import PROMPTS, profile_prompts  # noqa: PLC0415  (as above)

        for count, length in PROMPTS:
            answer(profile=profile_prompts(llm, count, length))


if __name__ == "__main__":
    main()
