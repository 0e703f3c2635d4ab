"""Loads encoders as transformers' own modules, once they have proved themselves."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import __version__ as version

from contract.domain.errors import invalid, unimplemented
from contract.domain.model_kind import ModelKind
from servicekit.checkpoint.model import Checkpoint
from worker_svc.core.transformers_models.encoder import TransformersCrossEncoder, TransformersEncoder
from worker_svc.core.transformers_models.encoder_proof import prove_encoder
from worker_svc.core.transformers_models.refusal import NotDoneError
from worker_svc.core.transformers_models.shrinking import num_layers_of
from worker_svc.core.transformers_models.tiny import CROSS_ENCODERS, ENCODERS, build
from worker_svc.device import choose_device, choose_dtype
from worker_svc.loaded_model import LoadedEncoder, ModelDescription, ModelSource
from worker_svc.runner_options import RunnerOptions
from worker_svc.transformers_checkpoint import ModuleConfig, check_loaded, load_module, refusal, stored_dtype
from worker_svc.weights import weight_files

# Of the standard library, as in `factory`.
_log = logging.getLogger(__name__)


class EncoderLoader:
    """Implement `Loader`."""

    def __init__(self, options: RunnerOptions, checkpoint: Checkpoint, found: ModuleConfig) -> None:
        """Have the module prove itself.

        Raises:
            PenstockError: UNIMPLEMENTED naming the architecture, and what of it is not done or not alike, or the option
                that encoders do not have; INVALID_ARGUMENT naming `max_model_len`: there are fewer positions.
        """
        _refuse(options)
        self._found = found
        is_cross = found.kind is ModelKind.CROSS_ENCODER
        self._door = CROSS_ENCODERS if is_cross else ENCODERS
        self._has_sigmoid = is_cross and _has_sigmoid(found)
        self._stored_dtype = stored_dtype(checkpoint)
        self._length = checkpoint.context_length(options.max_model_len)
        device = choose_device(options)
        dtype = choose_dtype(options.dtype, self._stored_dtype, device)
        try:
            self._proof = prove_encoder(found.config, self._length, device, dtype, self._door)
        except NotDoneError as error:
            raise refusal(found.architecture, f"{error}") from error
        self._longest_prompt = self._bounded(checkpoint, options)
        _log.info(
            "transformers' module proved",
            extra={
                "architecture": found.architecture,
                "error": self._proof.error,
                "layers": self._proof.num_layers,
                "tokens": self._proof.num_tokens,
                "attention": self._proof.attention,
            },
        )

    def _bounded(self, checkpoint: Checkpoint, options: RunnerOptions) -> int:
        """Tokens of the longest prompt: some modules keep a few positions for themselves."""
        if not (num_reserved := self._proof.num_reserved):
            return self._length
        longest = checkpoint.context_length() - num_reserved
        if options.max_model_len is not None and options.max_model_len > longest:
            raise invalid(
                f"max_model_len {options.max_model_len} exceeds the {longest} positions that the model in "
                f"{checkpoint.directory} has for prompts",
                "max_model_len",
            )
        return min(longest, self._length)

    def describe(self, options: RunnerOptions, device: torch.device) -> ModelDescription:
        """Implement `Loader.describe`."""
        found, dtype = self._found, choose_dtype(options.dtype, self._stored_dtype, device)
        num_layers = num_layers_of(found.config.to_dict()) or self._proof.num_layers
        return ModelDescription(
            found.architecture, "transformers", num_layers, None, self._num_weights() * dtype.itemsize
        )

    def load(self, source: ModelSource) -> LoadedEncoder:
        """Implement `Loader.load`."""
        dtype = choose_dtype(source.options.dtype, self._stored_dtype, source.device)
        if source.budget is not None:
            source.budget.check_weights(self._num_weights() * dtype.itemsize)
        if source.is_random:
            with source.device:
                module = build(self._found.config, self._proof.attention, self._door, dtype=dtype)
        else:
            module = self._with_weights(source, dtype)
        is_cross = self._found.kind is ModelKind.CROSS_ENCODER
        model = (
            TransformersCrossEncoder(module, has_sigmoid=self._has_sigmoid) if is_cross else TransformersEncoder(module)
        )
        architecture = self._found.architecture
        _log.info("transformers' module loaded", extra={"architecture": architecture, "transformers": version})
        sizes = model.num_layer_weights, self._longest_prompt, model.num_bytes
        return LoadedEncoder(model, self._found.kind, *sizes, dtype, str(dtype))

    def _num_weights(self) -> int:
        """Of the whole model, shared ones once; it is built without memory."""
        with torch.device("meta"):
            return build(self._found.config, self._proof.attention, self._door).num_parameters()

    def _with_weights(self, source: ModelSource, dtype: torch.dtype) -> Any:
        directory, config, proof = source.directory, self._found.config, self._proof
        module, told = load_module(self._door.auto, directory, config, proof.attention, dtype, source.device)
        is_cross = self._found.kind is ModelKind.CROSS_ENCODER
        heads = frozenset() if is_cross else _outside(weight_files(directory), module.base_model_prefix)
        check_loaded(directory, told, proof.unused | heads)
        return module


def _outside(files: list[Path], prefix: str) -> frozenset[str]:
    """The names of tensors that are no part of the model without its head, where the checkpoint has one."""
    names = set[str]()
    for file in files:
        with safe_open(file, "pt") as tensors:
            names.update(tensors.keys())
    others = frozenset(name for name in names if not name.startswith(f"{prefix}."))
    return others if len(others) < len(names) else frozenset()


def _has_sigmoid(found: ModuleConfig) -> bool:
    """Return whether a score is between 0 and 1, as sentence-transformers has it where a checkpoint says nothing.

    Raises:
        PenstockError: UNIMPLEMENTED: it says something else.
    """
    told = getattr(found.config, "sentence_transformers", None)
    said = told.get("activation_fn") if isinstance(told, Mapping) else None
    said = said or getattr(found.config, "sbert_ce_default_activation_function", None) or "Sigmoid"
    name = str(said).rpartition(".")[2]
    if name not in ("Sigmoid", "Identity"):
        raise refusal(found.architecture, f"has scores of another activation: {said!r:.80}")
    return name == "Sigmoid"


def _refuse(options: RunnerOptions) -> None:
    """Check what is asked for: an encoder keeps no keys and values, and attends by torch alone."""
    for name in ("num_blocks", "kv_cache_memory_bytes"):
        if getattr(options, name) is not None:
            raise unimplemented(name, f"{name} for an encoder, which keeps no keys and values,")
    if options.attention not in ("auto", "torch"):
        raise unimplemented("attention", f"attention {options.attention!r} for an encoder")
    if options.prefill_attention != "auto":
        raise unimplemented("prefill_attention", f"prefill_attention {options.prefill_attention!r} for an encoder")
