"""Checkpoints as transformers' own classes read them."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_MASKED_LM_MAPPING,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    MODEL_MAPPING,
    PreTrainedConfig,
)
from transformers import __version__ as version

from contract.domain.errors import ErrorCode, PenstockError, broken, unimplemented
from contract.domain.model_kind import ModelKind
from servicekit.checkpoint.model import CONFIG, Checkpoint
from worker_svc.core.memory import no_states_to_save
from worker_svc.core.models import FAMILIES
from worker_svc.core.models.media import TEXTS
from worker_svc.runner_options import RunnerOptions
from worker_svc.weights import weight_files

_ADAPTER = "adapter_config.json"  # transformers would add it to the weights
_BY_KIND = {
    ModelKind.DECODER: (MODEL_FOR_CAUSAL_LM_MAPPING,),
    ModelKind.ENCODER: (MODEL_MAPPING, MODEL_FOR_MASKED_LM_MAPPING),
    ModelKind.CROSS_ENCODER: (MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,),
}


@dataclass(frozen=True, slots=True)
class ModuleConfig:
    """The configuration of a checkpoint."""

    architecture: str  # the first that it names
    kind: ModelKind  # as which transformers has this architecture
    config: PreTrainedConfig


def read_module_config(checkpoint: Checkpoint) -> ModuleConfig:
    """The architecture, and the configuration as transformers' own class has it.

    Raises:
        PenstockError: UNIMPLEMENTED naming the architecture, which is not to be had; INTERNAL (operator): a file is
            broken.
    """
    fields, path = checkpoint.config, checkpoint.directory / CONFIG
    names, model_type = fields.get("architectures"), fields.get("model_type")
    if not isinstance(names, list) or not names:
        raise broken(f"{path}: architectures is missing: this is not the configuration of a language model")
    name = str(names[0])
    if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING:
        by_code = ": its code comes with the checkpoint (auto_map), and is not run" if fields.get("auto_map") else ""
        raise refusal(name, f"is of a model_type {model_type!r} that transformers {version} does not have{by_code}")
    if fields.get("quantization_config"):
        raise refusal(name, "has quantized weights (quantization_config)")
    if (checkpoint.directory / _ADAPTER).exists():
        raise refusal(name, f"is changed by an adapter ({_ADAPTER})")
    try:
        config: PreTrainedConfig = CONFIG_MAPPING[model_type].from_dict(fields)
    # As it is checked by each class.
    except Exception as error:
        raise broken(f"{path} is not what transformers' {model_type} has: {error}") from error
    return ModuleConfig(name, _kind_of(name, model_type, type(config)), config)


def _kind_of(name: str, model_type: str, made: type[PreTrainedConfig]) -> ModelKind:
    """The kind as which transformers has an architecture for configurations of a class."""
    known = {kind: [*_names_in(mappings, made)] for kind, mappings in _BY_KIND.items()}
    for kind, names in known.items():
        if name in names:
            return kind
    decoders, encoders, classifiers = (" or ".join(names) or "none" for names in known.values())
    raise refusal(
        name,
        f"is no decoder to transformers {version}, whose decoder of {model_type} is {decoders}, nor an encoder, of "
        f"which it has {encoders}, nor a cross-encoder, of which it has {classifiers}",
    )


def _names_in(mappings: Collection[Mapping[Any, Any]], made: type[PreTrainedConfig]) -> Iterator[str]:
    for mapping in mappings:
        found = mapping.get(made, ())
        yield from (str(each.__name__) for each in (found if isinstance(found, tuple) else (found,)))


def load_module(  # noqa: PLR0917
    auto: Any, directory: Path, config: PreTrainedConfig, attention: str, dtype: torch.dtype, device: torch.device
) -> tuple[Any, Mapping[str, Any]]:
    """The module with its weights, and what transformers tells of these; see `check_loaded`.

    `auto`: of transformers' classes that find the module of a configuration; `attention`: as it names them.

    Raises:
        PenstockError: INTERNAL (operator): the weights are missing or cannot be read.
    """
    weight_files(directory)  # says what is missing
    config.return_dict = True
    try:
        module, told = auto.from_pretrained(
            directory,
            config=config,
            dtype=dtype,
            attn_implementation=attention,
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
    except (OSError, RuntimeError, ValueError) as error:
        raise broken(f"transformers cannot read the weights in {directory}: {error}") from error
    return module.eval().to(device), told


def check_loaded(directory: Path, told: Mapping[str, Any], ignored: Collection[str] = ()) -> None:
    """Compare the names of tensors in a checkpoint with those of its module, as transformers tells of them.

    `ignored`: may be missing, or too many.

    Raises:
        PenstockError: INTERNAL (operator): they differ.
    """
    for what, field in (
        ("lacks the tensor", "missing_keys"),
        ("has a tensor that the model does not have:", "unexpected_keys"),
        ("has a tensor of another shape:", "mismatched_keys"),
    ):
        if names := sorted(set(map(str, told.get(field) or ())).difference(ignored)):
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise broken(f"{directory} {what} {names[0]}{more}")


def stored_dtype(checkpoint: Checkpoint) -> str | None:
    """The dtype of a checkpoint's weights, if it says one."""
    stored = checkpoint.text_field("dtype") or checkpoint.text_field("torch_dtype")
    return str(stored) if stored else None


def refuse_options(options: RunnerOptions) -> None:
    """Check what is asked for of any module of transformers'.

    Raises:
        PenstockError: UNIMPLEMENTED naming the option.
    """
    if options.world_size > 1:
        raise unimplemented(f"tensor_parallel_size {options.world_size} for a module of transformers'")
    if options.quantization is not None:
        raise unimplemented(f"quantization {options.quantization!r} for a module of transformers'")
    if options.num_saved_states:
        raise no_states_to_save(options.num_saved_states)
    if options.kv_cache_dtype != "auto":
        raise unimplemented(
            "kv_cache_dtype", f"kv_cache_dtype {options.kv_cache_dtype!r} for a module of transformers'"
        )


def refusal(name: str, why: str) -> PenstockError:
    """The error of an architecture that is not done."""
    way_out = (
        "leave model_impl out, Penstock has a family for it"
        if name in FAMILIES or name in TEXTS
        else "take a model that `penstock models` lists or, where it is a bound of the context, a lower max_model_len"
    )
    message = f"model architecture {name} cannot be run by transformers' own module: it {why}; {way_out}"
    return PenstockError(ErrorCode.UNIMPLEMENTED, message, param="model")
