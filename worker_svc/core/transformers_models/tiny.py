"""Tiny instances of models, with random weights."""

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedConfig,
    PreTrainedModel,
)

from worker_svc.core.transformers_models.model import run
from worker_svc.core.transformers_models.refusal import NotDoneError, said
from worker_svc.core.transformers_models.shrinking import (
    LONGEST,
    PASSED_BOUND,
    Shrinking,
    num_layers_of,
    shrinkings,
)

_MOST_WEIGHTS = 300_000_000
_DEVIATION = 0.2  # of what begins as a constant; of others for 64 inputs
_LEAST_LAYERS = 2


@dataclass(frozen=True, slots=True)
class Door:
    """A way to transformers' classes of models."""

    auto: Any  # the class that finds the one of a configuration
    run: Callable[[PreTrainedModel, Tensor], object]  # a forward pass over token ids i64[tokens]
    longest: int = LONGEST  # tokens that any tiny instance takes
    passed_bound: int = PASSED_BOUND  # see `Shrinking`


def run_encoder(module: PreTrainedModel, token_ids: Tensor) -> Any:
    """The module's forward pass over one prompt by itself."""
    return module(input_ids=token_ids[None], attention_mask=torch.ones_like(token_ids)[None])


DECODERS = Door(AutoModelForCausalLM, run)
# Some keep a few positions for themselves. The smallest bound lets short prompts pass products of several, too.
ENCODERS = Door(AutoModel, run_encoder, longest=LONGEST - 8, passed_bound=4)
CROSS_ENCODERS = replace(ENCODERS, auto=AutoModelForSequenceClassification)


def build(config: PreTrainedConfig, attention: str, door: Door = DECODERS, **options: Any) -> PreTrainedModel:
    """The module of a configuration with random weights, of transformers' own code."""
    config = copy.deepcopy(config)
    config.return_dict = True
    with torch.random.fork_rng(devices=[]):  # what is drawn takes nothing from the caller's numbers
        module: PreTrainedModel = door.auto.from_config(
            config, attn_implementation=attention, trust_remote_code=False, **options
        )
    module.train(mode=False)
    return module


def tiny(config: PreTrainedConfig, max_model_len: int, door: Door = DECODERS) -> PreTrainedModel:
    """The smallest instance of a configuration that can be made and run: eager, with random weights.

    Raises:
        NotDoneError: there is none.
    """
    fields = config.to_dict()
    reasons = []
    for shrinking in shrinkings(fields, max_model_len, door.passed_bound):
        try:
            return _made(config, fields, shrinking, door)
        # Modules raise whatever they like where sizes do not fit together.
        except Exception as error:  # noqa: BLE001
            reasons.append(said(error))
    raise NotDoneError(f"cannot be made small, which its proof needs ({reasons[0]})")


def _made(config: PreTrainedConfig, fields: Mapping[str, Any], shrinking: Shrinking, door: Door) -> PreTrainedModel:
    num_layers = _layers_of_all_kinds(config, fields, shrinking, door)
    small = _config(config, shrinking.shrink(fields, num_layers))
    with torch.device("meta"):
        num_weights = build(small, "eager", door).num_parameters()
    if num_weights > _MOST_WEIGHTS:
        raise ValueError(f"{num_weights} weights in {num_layers} layers")
    eager = build(small, "eager", door, dtype=torch.float32)
    randomize(eager)
    with torch.inference_mode():
        door.run(eager, torch.zeros(door.longest, dtype=torch.int64))
    return eager


def _layers_of_all_kinds(
    config: PreTrainedConfig, fields: Mapping[str, Any], shrinking: Shrinking, door: Door
) -> int | None:
    """As many of the first layers as have one of each kind; None: all."""
    whole = num_layers_of(fields)
    if whole is None or whole <= _LEAST_LAYERS:
        return None
    with torch.device("meta"):
        module = build(_config(config, shrinking.shrink(fields)), "eager", door)
    layers = next((each for each in module.modules() if isinstance(each, nn.ModuleList) and len(each) == whole), None)
    if layers is None:
        return None
    kinds = [_kind(layer) for layer in layers]
    return max(_LEAST_LAYERS, *(kinds.index(kind) + 1 for kind in kinds))


def _kind(layer: nn.Module) -> tuple[object, ...]:
    """The parts of a layer and what each remembers of its configuration, but for its number."""
    parts = []
    for name, part in layer.named_modules():
        told = {
            key: value
            for key, value in vars(part).items()
            if isinstance(value, bool | int | float | str | None) and not key.endswith(("idx", "layer_id", "number"))
        }
        shapes = tuple((key, tuple(each.shape)) for key, each in part.named_parameters(recurse=False))
        parts.append((name, type(part), tuple(sorted(told.items())), shapes))
    return tuple(parts)


def _config(config: PreTrainedConfig, fields: Mapping[str, Any]) -> PreTrainedConfig:
    return type(config).from_dict(dict(fields))


def randomize(module: nn.Module) -> None:
    """Weights that are the same every time, by which every part counts: what begins as a constant is near it."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in _floats(module):
            values = weight.flatten()
            is_constant = bool((values == values[0]).all())
            deviation = _DEVIATION if is_constant else _DEVIATION * (64 / weight.shape[-1]) ** 0.5
            drawn = torch.randn(weight.shape, generator=generator) * deviation
            weight.copy_(drawn + values[0] if is_constant else drawn)


def _floats(module: nn.Module) -> Iterator[Tensor]:
    """Parameters, and what else is stored and begins as a constant."""
    yield from module.parameters()
    stored = module.state_dict().keys()
    for name, buffer in module.named_buffers():
        if name in stored and buffer.is_floating_point() and bool((buffer == buffer.flatten()[0]).all()):
            yield buffer
