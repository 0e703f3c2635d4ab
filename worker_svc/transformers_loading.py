"""Loads decoders as transformers' own modules, once they have proved themselves."""

import logging
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig
from transformers import __version__ as version

from contract.domain.model_kind import ModelKind
from servicekit.checkpoint.model import Checkpoint
from worker_svc.compute import choose_compute
from worker_svc.core.transformers_models.attention import NAME, register
from worker_svc.core.transformers_models.model import TransformersLM
from worker_svc.core.transformers_models.proof import Proof, prove
from worker_svc.core.transformers_models.refusal import NotDoneError
from worker_svc.core.transformers_models.shrinking import num_layers_of
from worker_svc.core.transformers_models.tiny import build
from worker_svc.device import choose_dtype
from worker_svc.encoder_loading import EncoderLoader
from worker_svc.loaded_model import LoadedModel, Loader, ModelDescription, ModelSource
from worker_svc.runner_options import RunnerOptions
from worker_svc.transformers_checkpoint import (
    ModuleConfig,
    check_loaded,
    load_module,
    read_module_config,
    refusal,
    refuse_options,
    stored_dtype,
)

# Of the standard library, as in `factory`.
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Module:
    """An architecture of transformers' that has proved itself."""

    architecture: str
    config: PreTrainedConfig
    proof: Proof

    @property
    def num_weights(self) -> int:
        """Of the whole model, shared ones once; it is built without memory."""
        with torch.device("meta"):
            return build(self.config, NAME).num_parameters()


def transformers_loader(options: RunnerOptions, checkpoint: Checkpoint) -> Loader:
    """The way to load a checkpoint by transformers, once its module has proved itself.

    Raises:
        PenstockError: see `load_runner` and `read_module_config`.
    """
    refuse_options(options)
    found = read_module_config(checkpoint)
    if found.kind is not ModelKind.DECODER:
        return EncoderLoader(options, checkpoint, found)
    return TransformersLoader(options, checkpoint, found)


def prove_module(found: ModuleConfig, max_model_len: int) -> Module:
    """The module of a configuration, before any weights are read.

    Raises:
        PenstockError: UNIMPLEMENTED naming the architecture, and what of it is not done or not alike.
    """
    register()
    name, config = found.architecture, found.config
    try:
        proof = prove(config, max_model_len)
    except NotDoneError as error:
        raise refusal(name, f"{error}") from error
    _log.info(
        "transformers' module proved",
        extra={"architecture": name, "error": proof.error, "layers": proof.num_layers, "tokens": proof.num_rows},
    )
    return Module(name, config, proof)


class TransformersLoader:
    """Implement `Loader`."""

    def __init__(self, options: RunnerOptions, checkpoint: Checkpoint, found: ModuleConfig) -> None:
        """Have the module prove itself.

        Raises:
            PenstockError: see `prove_module`.
        """
        self._stored_dtype = stored_dtype(checkpoint)
        self._module = prove_module(found, checkpoint.context_length(options.max_model_len))

    def describe(self, options: RunnerOptions, device: torch.device) -> ModelDescription:
        """Implement `Loader.describe`."""
        found, dtype = self._module, choose_dtype(options.dtype, self._stored_dtype, device)
        num_layers = num_layers_of(found.config.to_dict()) or found.proof.num_layers
        num_bytes = found.num_weights * dtype.itemsize
        return ModelDescription(found.architecture, "transformers", num_layers, None, num_bytes)

    def load(self, source: ModelSource) -> LoadedModel:
        """Implement `Loader.load`."""
        return _load(source, self._module)


def _load(source: ModelSource, found: Module) -> LoadedModel:
    options, device = source.options, source.device
    dtype = choose_dtype(options.dtype, stored_dtype(source.checkpoint), device)
    if source.budget is not None:
        source.budget.check_weights(found.num_weights * dtype.itemsize)
    model = _make(source, found, dtype)
    shape = model.cache_shape(options.block_size, dtype)
    compute = choose_compute(
        options.attention, options.prefill_attention, device, shape, model.num_heads, products=(), tuning=options.tuning
    )
    _log.info("transformers' module loaded", extra={"architecture": found.architecture, "transformers": version})
    return LoadedModel(model, compute, shape, None, model.num_heads, model.num_bytes, dtype, "transformers", str(dtype))


def _make(source: ModelSource, found: Module, dtype: torch.dtype) -> TransformersLM:
    if source.is_random:
        with source.device:
            module = build(found.config, NAME, dtype=dtype)
    else:
        module = _with_weights(source, found.config, dtype)
    try:
        model = TransformersLM(module, source.max_model_len)
    except NotDoneError as error:
        raise refusal(found.architecture, f"{error}") from error
    if unproved := {each.features for each in model.calls.calls} - found.proof.features:
        raise refusal(found.architecture, f"attends as its tiny instance did not ({unproved})")
    return model


def _with_weights(source: ModelSource, config: PreTrainedConfig, dtype: torch.dtype) -> Any:
    module, told = load_module(AutoModelForCausalLM, source.directory, config, NAME, dtype, source.device)
    check_loaded(source.directory, told)
    return module
