"""A checkpoint's `config.json`, checked: nothing in it is silently ignored."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from contract.domain.errors import unimplemented
from worker_svc.core.models import FAMILIES
from worker_svc.core.models.config_fields import ConfigFields
from worker_svc.core.models.media import TEXTS, text_fields
from worker_svc.core.models.spec import AnyAttentionSpec, DecoderSpec
from worker_svc.core.quantization.choice import parse_quantization
from worker_svc.core.quantization.spec import QuantizationSpec


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder-only transformer of one of `FAMILIES`."""

    architecture: str
    decoder: DecoderSpec
    quantization: QuantizationSpec | None
    dtype: str | None  # as stored: "float32", "bfloat16", "float16"; None: not told
    is_text_of: str | None = None  # the architecture of several media of whose checkpoint this is the text; None: none

    @property
    def attention(self) -> AnyAttentionSpec:
        """Of the first layer; heads are the same in all."""
        return self.decoder.attentions[0]


def parse_config(fields: Mapping[str, Any], source: str) -> ModelConfig:
    """The model that `fields`, the parsed `config.json` at `source`, describes.

    Raises:
        PenstockError: UNIMPLEMENTED naming the architecture or feature; INTERNAL (the operator's fault) naming the
            field of `source` that is missing or makes no sense.
    """
    text = text_fields(fields)
    reader = ConfigFields(fields if text is None else text, source)
    architecture = _architecture(reader)
    config = ModelConfig(
        architecture=architecture,
        decoder=FAMILIES[architecture](reader),
        quantization=_quantization(reader),
        dtype=reader.get("dtype") or reader.get("torch_dtype"),
        is_text_of=None if text is None else fields["architectures"][0],
    )
    reader.refuse_unread()
    if not config.decoder.attentions:
        raise unimplemented("a model none of whose layers attends (layer_types)")
    if len({(each.num_heads, each.num_kv_heads, each.head_dim) for each in config.decoder.attentions}) > 1:
        raise unimplemented("layers that differ in heads")
    return config


def _quantization(reader: ConfigFields) -> QuantizationSpec | None:
    told = reader.get("quantization_config")
    if told and not isinstance(told, Mapping):
        raise reader.wrong("quantization_config", f"must be an object, got {told!r}")
    return parse_quantization(told) if told else None


def _architecture(reader: ConfigFields) -> str:
    names = reader.get("architectures")
    if not isinstance(names, list) or not names or not isinstance(names[0], str):
        raise reader.wrong("architectures", "is missing: this is not the configuration of a language model")
    if names[0] not in FAMILIES:
        raise unimplemented(f"model architecture {names[0]} (there are: {', '.join((*FAMILIES, *TEXTS))})")
    return names[0]
