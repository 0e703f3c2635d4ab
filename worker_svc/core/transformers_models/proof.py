"""The proof that a decoder's module computes over paged attention what it computes by itself: on a tiny instance with
random weights, through a rehearsal.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from worker_svc.core.attention.torch_backend import TorchAttention
from worker_svc.core.kv_cache import KVCache
from worker_svc.core.rehearsal import BLOCK_SIZE, Line, limits_of, rehearse
from worker_svc.core.runner import ModelRunner
from worker_svc.core.transformers_models.attention import NAME
from worker_svc.core.transformers_models.mixing import refuse_mixing
from worker_svc.core.transformers_models.model import TransformersLM, run
from worker_svc.core.transformers_models.refusal import NotDoneError, said
from worker_svc.core.transformers_models.shrinking import LONGEST
from worker_svc.core.transformers_models.tiny import build, tiny

TOLERANCE = 1e-3  # of log-probabilities; rounding is off by some 1e-5, what is wrong by tenths and more
# By a module that is handed what it does not expect.
_RAISED = (RuntimeError, TypeError, ValueError, IndexError, AttributeError, AssertionError, KeyError)


@dataclass(frozen=True, slots=True)
class Proof:
    """The result of a rehearsal that agreed."""

    error: float  # of log-probabilities, the largest
    num_layers: int
    features: frozenset[tuple[str, ...]]  # of the layers' attention
    num_rows: int  # tokens whose log-probabilities were compared


def prove(config: PreTrainedConfig, max_model_len: int) -> Proof:
    """Compare a tiny instance over paged attention with its eager self, in contexts of up to `max_model_len`.

    Raises:
        NotDoneError: they differ, or it asks for something that is not done.
    """
    eager = tiny(config, max_model_len)
    module = _over(NAME, eager)
    try:
        model = TransformersLM(module, LONGEST)
    except _RAISED as error:
        raise NotDoneError(f"has attention of its own, or a mask of its own for it ({said(error)})") from error
    refuse_mixing(module, model.calls, LONGEST)
    try:
        lines = rehearse(_runner(model))
    except _RAISED as error:
        raise NotDoneError(f"cannot compute several sequences in a row of tokens ({said(error)})") from error
    worst = worst_error(eager, lines)
    if not worst <= TOLERANCE:
        raise NotDoneError(
            f"differs over paged attention from what its module computes by itself: by {worst:.2g} in a "
            f"log-probability, where rounding is below {TOLERANCE:g}"
        )
    features = frozenset(call.features for call in model.calls.calls)
    return Proof(worst, len(model.attentions), features, sum(len(line.logprobs) for line in lines))


@torch.inference_mode()
def worst_error(eager: PreTrainedModel, lines: Sequence[Line]) -> float:
    """The largest difference of a log-probability from those of a whole sequence at once; NaN where there is one."""
    errors = []
    for line in lines:
        expected = run(eager, torch.tensor(line.token_ids)).logits[0].float().log_softmax(-1)
        places = sorted(line.logprobs)
        found = torch.stack([torch.from_numpy(line.logprobs[place]) for place in places])
        errors.append((found - expected[[place - 1 for place in places]]).abs().max())
    return float(torch.stack(errors).max())


def _over(attention: str, eager: PreTrainedModel) -> PreTrainedModel:
    """The same module by another attention.

    Raises:
        NotDoneError: it takes no other.
    """
    try:
        module = build(eager.config, attention, dtype=torch.float32)
    # As above.
    except Exception as error:
        raise NotDoneError(f"does not attend by transformers' attention functions ({said(error)})") from error
    module.load_state_dict(eager.state_dict())
    return module


def _runner(model: TransformersLM) -> ModelRunner:
    shape = model.cache_shape(BLOCK_SIZE, torch.float32)
    limits = limits_of(model.vocab_size, LONGEST, shape.layout.kinds)
    cache = KVCache(shape, limits.num_blocks + 1, torch.device("cpu"))
    attention = TorchAttention(cache, model.num_heads, model.attentions)
    return ModelRunner(model, cache, attention, limits, lambda: 0)
