"""Loads decoders as transformers' own modules, once they have proved themselves."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM, PreTrainedConfig
from transformers import __version__ as version

from contract.domain.errors import ErrorCode, PenstockError, broken, unimplemented
from servicekit.checkpoint.model import CONFIG, Checkpoint
from worker_svc.compute import choose_compute
from worker_svc.core.models import FAMILIES
from worker_svc.core.transformers_models.attention import NAME, register
from worker_svc.core.transformers_models.model import TransformersLM
from worker_svc.core.transformers_models.proof import Proof, prove
from worker_svc.core.transformers_models.refusal import NotDoneError
from worker_svc.core.transformers_models.shrinking import num_layers_of
from worker_svc.core.transformers_models.tiny import build
from worker_svc.device import choose_dtype
from worker_svc.loaded_model import LoadedModel, ModelDescription, ModelSource
from worker_svc.runner_options import RunnerOptions
from worker_svc.weights import weight_files

# Of the standard library, as in `factory`.
_log = logging.getLogger(__name__)

_ADAPTER = "adapter_config.json"  # transformers would add it to the weights


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


def read_module(checkpoint: Checkpoint, max_model_len: int) -> Module:
    """The module of a checkpoint, before any weights are read.

    Raises:
        PenstockError: UNIMPLEMENTED naming the architecture, and what of it is not done or not alike.
    """
    register()
    name, config = _read_config(checkpoint)
    try:
        proof = prove(config, max_model_len)
    except NotDoneError as error:
        raise _refusal(name, f"{error}") from error
    _log.info(
        "transformers' module proved",
        extra={"architecture": name, "error": proof.error, "layers": proof.num_layers, "tokens": proof.num_rows},
    )
    return Module(name, config, proof)


class TransformersLoader:
    """Implement `Loader`."""

    def __init__(self, options: RunnerOptions, checkpoint: Checkpoint) -> None:
        """Have the module prove itself.

        Raises:
            PenstockError: see `load_runner` and `read_module`.
        """
        if options.world_size > 1:
            raise unimplemented(f"tensor_parallel_size {options.world_size} for a module of transformers'")
        if options.quantization is not None:
            raise unimplemented(f"quantization {options.quantization!r} for a module of transformers'")
        if options.kv_cache_dtype != "auto":
            raise unimplemented(
                "kv_cache_dtype", f"kv_cache_dtype {options.kv_cache_dtype!r} for a module of transformers'"
            )
        self._stored_dtype = _stored_dtype(checkpoint)
        self._module = read_module(checkpoint, checkpoint.context_length(options.max_model_len))

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
    dtype = choose_dtype(options.dtype, _stored_dtype(source.checkpoint), device)
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
        raise _refusal(found.architecture, f"{error}") from error
    if unproved := {each.features for each in model.calls.calls} - found.proof.features:
        raise _refusal(found.architecture, f"attends as its tiny instance did not ({unproved})")
    return model


def _with_weights(source: ModelSource, config: PreTrainedConfig, dtype: torch.dtype) -> Any:
    directory = source.directory
    weight_files(directory)  # says what is missing
    config.return_dict = True
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            directory,
            config=config,
            dtype=dtype,
            attn_implementation=NAME,
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
    except (OSError, RuntimeError, ValueError) as error:
        raise broken(f"transformers cannot read the weights in {directory}: {error}") from error
    module, told = loaded
    _check(directory, told)
    return module.eval().to(source.device)


def _check(directory: object, told: Mapping[str, Any]) -> None:
    for what, field in (
        ("lacks the tensor", "missing_keys"),
        ("has a tensor that the model does not have:", "unexpected_keys"),
        ("has a tensor of another shape:", "mismatched_keys"),
    ):
        if names := sorted(map(str, told.get(field) or ())):
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise broken(f"{directory} {what} {names[0]}{more}")


def _read_config(checkpoint: Checkpoint) -> tuple[str, PreTrainedConfig]:
    """The architecture, and the configuration as transformers' own class has it."""
    fields, path = checkpoint.config, checkpoint.directory / CONFIG
    names, kind = fields.get("architectures"), fields.get("model_type")
    if not isinstance(names, list) or not names:
        raise broken(f"{path}: architectures is missing: this is not the configuration of a language model")
    name = str(names[0])
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
        by_code = ": its code comes with the checkpoint (auto_map), and is not run" if fields.get("auto_map") else ""
        raise _refusal(name, f"is of a model_type {kind!r} that transformers {version} does not have{by_code}")
    if fields.get("quantization_config"):
        raise _refusal(name, "has quantized weights (quantization_config)")
    if (checkpoint.directory / _ADAPTER).exists():
        raise _refusal(name, f"is changed by an adapter ({_ADAPTER})")
    try:
        config: PreTrainedConfig = CONFIG_MAPPING[kind].from_dict(fields)
    # As it is checked by each class.
    except Exception as error:
        raise broken(f"{path} is not what transformers' {kind} has: {error}") from error
    known = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    known_name = getattr(known, "__name__", None)
    if known_name != name:
        raise _refusal(name, f"is no decoder to transformers {version}, whose decoder of {kind} is {known_name}")
    return name, config


def _stored_dtype(checkpoint: Checkpoint) -> str | None:
    stored = checkpoint.text_field("dtype") or checkpoint.text_field("torch_dtype")
    return str(stored) if stored else None


def _refusal(name: str, why: str) -> PenstockError:
    way_out = (
        "leave model_impl out, Penstock has a family for it"
        if name in FAMILIES
        else "take a model that `penstock models` lists or, where it is a bound of the context, a lower max_model_len"
    )
    message = f"model architecture {name} cannot be run by transformers' own module: it {why}; {way_out}"
    return PenstockError(ErrorCode.UNIMPLEMENTED, message, param="model")
