"""What a checkpoint's `config.json` says about the model, checked: nothing in it is silently ignored."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from penstock.domain.errors import ErrorCode, PenstockError, unimplemented

ARCHITECTURES = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
_ROPE_TYPES = ("default", "linear", "llama3")
_QWEN3_HEAD_DIM = 128  # what Qwen3's configuration means where it leaves `head_dim` out


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding: base and, for `linear` and `llama3`, how positions are stretched."""

    theta: float = 10000.0
    rope_type: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0  # llama3 only, as the next two
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder-only transformer of one of `ARCHITECTURES`."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope: RopeConfig
    attention_bias: bool  # Llama, Qwen3: biases of q, k, v and o; Qwen2 has those of q, k and v always
    mlp_bias: bool  # Llama only
    tie_word_embeddings: bool
    dtype: str | None  # as stored: "float32", "bfloat16", "float16"; None: not told
    eos_token_ids: tuple[int, ...]

    @property
    def longest_context(self) -> int:
        """Tokens that it can be asked for: a linear rope stretches the positions, those of llama3 are stretched."""
        stretched = self.max_position_embeddings * self.rope.factor
        return int(stretched) if self.rope.rope_type == "linear" else self.max_position_embeddings

    @property
    def num_layer_weights(self) -> int:
        """What all layers multiply a token with."""
        heads = 2 * self.num_heads + 2 * self.num_kv_heads
        return self.num_layers * self.hidden_size * (heads * self.head_dim + 3 * self.intermediate_size)


def parse_config(fields: Mapping[str, Any], source: str) -> ModelConfig:
    """The model that `fields`, the parsed `config.json` at `source`, describes.

    Raises:
        PenstockError: UNIMPLEMENTED naming the architecture or feature; INTERNAL (the operator's fault) naming the
            field of `source` that is missing or makes no sense.
    """
    reader = _Reader(fields, source)
    architecture = reader.architecture()
    reader.refuse_unsupported()
    num_heads = reader.count("num_attention_heads")
    hidden_size = reader.count("hidden_size")
    default_head_dim = _QWEN3_HEAD_DIM if architecture == "Qwen3ForCausalLM" else hidden_size // num_heads
    config = ModelConfig(
        architecture=architecture,
        vocab_size=reader.count("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=reader.count("intermediate_size"),
        num_layers=reader.count("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=reader.count("num_key_value_heads", num_heads),
        head_dim=reader.count("head_dim", default_head_dim),
        max_position_embeddings=reader.count("max_position_embeddings"),
        rms_norm_eps=reader.positive("rms_norm_eps", 1e-6),
        rope=reader.rope(),
        attention_bias=reader.flag("attention_bias"),
        mlp_bias=reader.flag("mlp_bias"),
        tie_word_embeddings=reader.flag("tie_word_embeddings"),
        dtype=fields.get("dtype") or fields.get("torch_dtype"),
        eos_token_ids=reader.token_ids("eos_token_id"),
    )
    if config.num_heads % config.num_kv_heads:
        raise reader.wrong("num_key_value_heads", f"does not divide num_attention_heads ({config.num_heads})")
    if config.head_dim % 2:
        raise reader.wrong("head_dim", "is odd, rotary embedding needs pairs")
    return config


class _Reader:
    """Typed access to `config.json`, with errors that name file and field."""

    def __init__(self, fields: Mapping[str, Any], source: str) -> None:
        self._fields = fields
        self._source = source

    def wrong(self, field: str, what: str) -> PenstockError:
        return PenstockError(ErrorCode.INTERNAL, f"{self._source}: {field} {what}", param=field)

    def architecture(self) -> str:
        names = self._fields.get("architectures")
        if not isinstance(names, list) or not names or not isinstance(names[0], str):
            raise self.wrong("architectures", "is missing: this is not the configuration of a language model")
        if names[0] not in ARCHITECTURES:
            raise unimplemented(f"model architecture {names[0]} (there are: {', '.join(ARCHITECTURES)})")
        return names[0]

    def refuse_unsupported(self) -> None:
        quantization = self._fields.get("quantization_config")
        if quantization:
            method = quantization.get("quant_method", "unnamed") if isinstance(quantization, Mapping) else quantization
            raise unimplemented(f"quantization ({method})")
        if self.flag("use_sliding_window") or "sliding_attention" in (self._fields.get("layer_types") or ()):
            raise unimplemented("sliding window attention (use_sliding_window)")
        activation = self._fields.get("hidden_act", "silu")
        if activation != "silu":
            raise unimplemented(f"activation function (hidden_act) {activation!r}")

    def count(self, field: str, default: int | None = None) -> int:
        value = self._fields.get(field)
        if value is None:
            value = default
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.wrong(field, f"must be a positive integer, got {value!r}")
        return value

    def positive(self, field: str, default: float) -> float:
        return _positive(self, self._fields, field, default)

    def flag(self, field: str) -> bool:
        value = self._fields.get(field) or False
        if not isinstance(value, bool):
            raise self.wrong(field, f"must be true or false, got {value!r}")
        return value

    def token_ids(self, field: str) -> tuple[int, ...]:
        value = self._fields.get(field)
        values = [] if value is None else value if isinstance(value, list) else [value]
        if not all(isinstance(token_id, int) and token_id >= 0 for token_id in values):
            raise self.wrong(field, f"must be a token id or a list of them, got {value!r}")
        return tuple(values)

    def rope(self) -> RopeConfig:
        """`rope_parameters` (transformers 5), or `rope_theta` beside `rope_scaling` (before), which wins over it."""
        field = "rope_scaling" if self._fields.get("rope_scaling") else "rope_parameters"
        parameters = self._fields.get(field) or {}
        if not isinstance(parameters, Mapping):
            raise self.wrong(field, f"must be an object, got {parameters!r}")
        rope_type = parameters.get("rope_type", parameters.get("type", "default"))
        if rope_type not in _ROPE_TYPES:
            raise unimplemented(f"rope type {rope_type!r} (there are: {', '.join(_ROPE_TYPES)})")
        partial = parameters.get("partial_rotary_factor", self._fields.get("partial_rotary_factor"))
        if partial not in (None, 1, 1.0):
            raise unimplemented(f"partial rotary embedding (partial_rotary_factor {partial})")
        theta = _positive(self, parameters, "rope_theta", _positive(self, self._fields, "rope_theta", 10000.0))
        if rope_type == "default":
            return RopeConfig(theta)
        factor = _positive(self, parameters, "factor", None)
        if rope_type == "linear":
            return RopeConfig(theta, rope_type, factor)
        low = _positive(self, parameters, "low_freq_factor", None)
        high = _positive(self, parameters, "high_freq_factor", None)
        original = _positive(self, parameters, "original_max_position_embeddings", None)
        if high <= low:
            raise self.wrong("high_freq_factor", f"must exceed low_freq_factor ({low:g}), got {high:g}")
        return RopeConfig(theta, rope_type, factor, low, high, int(original))


def _positive(reader: _Reader, fields: Mapping[str, Any], field: str, default: float | None) -> float:
    value = fields.get(field)
    if value is None:
        value = default
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value) or value <= 0:
        raise reader.wrong(field, f"must be a positive number, got {value!r}")
    return float(value)
