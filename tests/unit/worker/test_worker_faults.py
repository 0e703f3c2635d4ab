"""Faults strike at the tokens that they were told, in prompts and in outputs, and nowhere else."""

from itertools import islice

import numpy as np
import pytest

from contract.domain.params import Sampling
from contract.domain.plan import Admission, StepPlan
from worker_svc.core.faults import Faults, FaultyRunner
from worker_svc.core.interface import Limits
from worker_svc.core.pretended_model import expected_tokens
from worker_svc.core.simulated import SimulatedConfig, SimulatedRunner

LIMITS = Limits(
    num_blocks=8, block_size=4, max_num_seqs=1, max_model_len=32, max_num_batched_tokens=32, vocab_size=1000,
    eos_token_ids=(2,),
)  # fmt: skip
PROMPT = [5, 6, 7]
GREEDY = Sampling(temperature=0.0)
OUTPUT = list(islice(expected_tokens(PROMPT, GREEDY, 0, LIMITS), 2))


class Died(Exception):  # noqa: N818
    """In place of the end of the process."""


class Hung(Exception):  # noqa: N818
    """In place of a wait without end."""


def die() -> None:
    raise Died


def sleep(_seconds: float) -> None:
    raise Hung


def steps(faults: Faults) -> list[int]:
    """The first two tokens behind the prompt."""
    simulated = SimulatedRunner(LIMITS, SimulatedConfig(step_s=0.0), lambda: 0, sleep)
    runner = FaultyRunner(simulated, faults, die, sleep)
    assert runner.limits is LIMITS
    admission = Admission(
        slot=0,
        token_ids=np.array(PROMPT, np.uint32),
        num_prompt_tokens=len(PROMPT),
        num_computed_tokens=0,
        block_ids=np.arange(2, dtype=np.uint32),
        sampling=GREEDY,
        seed=0,
    )
    slots = np.zeros(1, np.uint32)
    first = StepPlan(1, admissions=(admission,), slots=slots, num_tokens=np.array([len(PROMPT)], np.uint32))
    second = StepPlan(2, slots=slots, num_tokens=np.ones(1, np.uint32))
    made = [runner.launch(plan).result().token_ids.tolist() for plan in (first, second)]
    runner.close()
    return [token_id for tokens in made for token_id in tokens]


def test_other_tokens_do_nothing() -> None:
    unused = next(token_id for token_id in range(1, 1000) if token_id not in PROMPT + OUTPUT)
    assert steps(Faults(die_on_token=unused, hang_on_token=unused)) == OUTPUT


@pytest.mark.parametrize("token_id", [PROMPT[1], OUTPUT[0], OUTPUT[1]], ids=["prompt", "first", "second"])
def test_a_fault_strikes_at_its_token(token_id: int) -> None:
    with pytest.raises(Died):
        steps(Faults(die_on_token=token_id))
    with pytest.raises(Hung):
        steps(Faults(hang_on_token=token_id))


def test_without_a_token_there_are_no_faults() -> None:
    assert not Faults()
    assert Faults(die_on_token=0)
    assert Faults(hang_on_token=0)
