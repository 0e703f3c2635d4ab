"""Fields of every family's specification (`spec_mutations`) cannot have another value unseen: logprobs move away from
transformers', or there is no such model.
"""

import re
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from checkpoints import VARIANTS, VOCAB_SIZE, Variant, save_checkpoint
from plans import Drive, drive
from spec_mutations import mutations
from teacher import Answered, expected_logprobs, logprob_errors

from contract.domain.errors import PenstockError
from contract.domain.params import Sampling
from servicekit.checkpoint.model import Checkpoint, read_checkpoint
from worker_svc import native
from worker_svc.core.config import ModelConfig
from worker_svc.factory import load_runner
from worker_svc.model_config import read_model_config
from worker_svc.runner_options import RunnerOptions

FAMILIES = sorted({variant.family for variant in VARIANTS})
RIGHT, SEEN = 2e-5, 1e-3  # logprobs that are right are off by less than the former
# What says nothing in a model as small as these, by variant: of rotations `test_rotary.py` knows it.
NOTHING: dict[str, str] = {
    "cohere2_biases": r"window",  # as long as the context
    "mistral_window_of_the_context": r"window",
    "llama4_some_dense": r"rope\.(low_freq|original)",  # both factors are alike, no frequency is between
    "phi3_partial_longrope": r"rope\.long_factors",  # contexts are within the original length
}
_OF_YARN = re.compile(r"yarn.*rope\.(beta_fast|original)")  # of so few pairs none turns so fast
_NOT_READ = re.compile(r"holds (\S+?),")  # a tensor that a changed specification leaves out


def says_nothing(variant: Variant, field: str) -> bool:
    """Return whether the model is the same with another value of it."""
    pattern = NOTHING.get(variant.name)
    return bool(_OF_YARN.search(field) or (pattern and re.search(pattern, field)))


class Model:
    """A checkpoint, and how far the runner is from transformers with any configuration."""

    def __init__(self, folder: Path, variant: Variant, monkeypatch: pytest.MonkeyPatch) -> None:
        self._theirs = save_checkpoint(folder, variant)
        self._options = RunnerOptions(str(folder), device="cpu", dtype="float32", max_num_seqs=1, num_blocks=64)
        self._monkeypatch = monkeypatch
        self.num_impossible = 0
        self.config = read_model_config(read_checkpoint(folder))

    def error(self, config: ModelConfig) -> float:
        """Of logprobs, the largest."""

        def read(_: Checkpoint) -> ModelConfig:
            return config

        self._monkeypatch.setattr(native, "read_model_config", read)
        loaded = load_runner(self._options, time.monotonic_ns)
        prompt = [3 + 7 * place % (VOCAB_SIZE - 3) for place in range(40)]
        sequence = Drive(prompt, 4, Sampling(temperature=0.0, num_logprobs=2))
        drive(loaded.runner, [sequence])
        answer = Answered.of(sequence)
        loaded.close()
        return float(logprob_errors(expected_logprobs(self._theirs, answer), answer, 2).max())

    def is_seen(self, config: ModelConfig) -> bool:
        """Return whether anybody notices that it is another; tensors that it does not read are let be."""
        decoder = config.decoder
        while True:
            try:
                return self.error(replace(config, decoder=decoder)) > SEEN
            except PenstockError as error:
                left_out = _NOT_READ.search(str(error))
                if left_out is None:
                    return True
                decoder = replace(decoder, unused_prefixes=(*decoder.unused_prefixes, left_out[1]))
            except (AssertionError, RuntimeError):  # such a model there is not
                self.num_impossible += 1
                return True


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("family", FAMILIES)
def test_another_value_of_any_field_is_seen(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: set[str] = set()
    unseen = []
    num_impossible = 0
    for variant in (variant for variant in VARIANTS if variant.family == family):
        model = Model(tmp_path / variant.name, variant, monkeypatch)
        assert model.error(model.config) < RIGHT
        for field, decoder in mutations(model.config.decoder):
            if field in done or says_nothing(variant, field):
                continue
            done.add(field)
            if not model.is_seen(replace(model.config, decoder=decoder)):
                unseen.append((variant.name, field))
        num_impossible += model.num_impossible
    assert unseen == []
    assert len(done) > 15
    assert num_impossible <= len(done) / 4, "most are models, whose logprobs were compared"
