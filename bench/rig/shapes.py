"""Shapes of published models: folders without weights, which engines load with random ones, and what a step of such a
model must read and compute.
"""

import json
import sysconfig
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from bench.rig.checkpoint import write_tokenizer
from bench.rig.skew import shares

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
NUM_TRAINED = 32_000  # entries of the trained tokenizer before the special ones
_NUM_SOURCES = 1500
_EOS = 151_645  # of vocabularies as large as Qwen's; of smaller ones the last
_BYTES = 2  # of a number in bf16
_CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass(frozen=True)
class Experts:
    """The experts of a layer."""

    count: int
    top_k: int
    intermediate_size: int
    shared_size: int = 0  # of the block that every token goes through
    num_dense_layers: int = 0  # the first so many have a dense block instead
    skew: float = 0.0  # the exponent of Zipf's law by which they are chosen; 0: all as often

    def read(self, num_tokens: int) -> float:
        """The experts that so many tokens are expected to choose."""
        return sum(1 - (1 - share) ** num_tokens for share in shares(self.count, self.top_k, self.skew))


@dataclass(frozen=True)
class Latent:
    """Multi-head latent attention without a low rank of queries."""

    rank: int
    rotated_dims: int
    plain_dims: int
    value_dims: int


@dataclass(frozen=True)
class Shape:
    """A model's dimensions."""

    architecture: str
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int = 151_936
    has_tied_head: bool = False
    has_texts: bool = False  # its tokenizer was trained on text: prompts are texts, and every id has one
    experts: Experts | None = None
    latent: Latent | None = None
    window: int | None = None  # tokens that all layers but those that see all see
    num_full_layers: int = 0  # with a window: those that see all
    quantization: str | None = None  # as engines are asked to round weights when they read them
    kv_cache_dtype: str = "auto"  # in which engines are asked to keep keys and values
    layer_bits: float = 8 * _BYTES  # of a number of layers' matrices, as it is read for a product, with its scales
    expert_bits: float | None = None  # of experts; None: as of the rest
    fields: Mapping[str, Any] = field(default_factory=dict)  # of config.json, beside the dimensions

    @property
    def head_parameters(self) -> int:
        """Read in every step, used only for tokens that are sampled."""
        return self.vocab_size * self.hidden_size

    @property
    def _attention_parameters(self) -> int:
        """Of a layer."""
        if self.latent is None:
            return self.hidden_size * self.head_dim * 2 * (self.num_heads + self.num_kv_heads)
        latent = self.latent
        queries = self.hidden_size * self.num_heads * (latent.plain_dims + latent.rotated_dims)
        down = self.hidden_size * (latent.rank + latent.rotated_dims)
        up = latent.rank * self.num_heads * (latent.plain_dims + latent.value_dims)
        return queries + down + up + self.num_heads * latent.value_dims * self.hidden_size

    def _layer_parameters(self, num_experts: float) -> float:
        """Of all layers, where so many experts count in each that has some."""
        dense = 3 * self.hidden_size * self.intermediate_size
        attention = self.num_layers * self._attention_parameters
        if self.experts is None:
            return attention + self.num_layers * dense
        experts = self.experts
        each, shared = (3 * self.hidden_size * size for size in (experts.intermediate_size, experts.shared_size))
        sparse = self.hidden_size * experts.count + shared + num_experts * each
        num_sparse = self.num_layers - experts.num_dense_layers
        return attention + experts.num_dense_layers * dense + num_sparse * sparse

    @property
    def num_parameters(self) -> float:
        """Of all layers' matrices and the head."""
        return self._layer_parameters(self.experts.count if self.experts else 0) + self.head_parameters

    @property
    def token_parameters(self) -> float:
        """Numbers of the layers that a token is multiplied with."""
        return self._layer_parameters(self.experts.top_k if self.experts else 0)

    def weight_bytes(self, num_tokens: int) -> float:
        """Bytes of weights that a step of so many tokens reads; the head and routers stay in bf16."""
        head = self.head_parameters * _BYTES
        if self.experts is None:
            return self._layer_parameters(0) * self.layer_bits / 8 + head
        layers = self._layer_parameters(self.experts.read(num_tokens))
        rest = self._layer_parameters(0)
        routers = (self.num_layers - self.experts.num_dense_layers) * self.hidden_size * self.experts.count
        bits = self.layer_bits if self.expert_bits is None else self.expert_bits
        return ((rest - routers) * self.layer_bits + (layers - rest) * bits) / 8 + routers * _BYTES + head

    def kv_bytes(self, context: int) -> int:
        """Bytes of keys and values that a token reads after `context` tokens."""
        width = 1 if self.kv_cache_dtype == "fp8" else _BYTES
        num_numbers = 2 * self.num_kv_heads * self.head_dim
        if self.latent is not None:
            num_numbers = self.latent.rank + self.latent.rotated_dims
        if self.window is None:
            return self.num_layers * num_numbers * context * width
        num_local = self.num_layers - self.num_full_layers
        return (num_local * min(context, self.window) + self.num_full_layers * context) * num_numbers * width

    @property
    def config(self) -> dict[str, Any]:
        """Of config.json."""
        return {
            "architectures": [self.architecture],
            "hidden_size": self.hidden_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "intermediate_size": self.intermediate_size,
            "tie_word_embeddings": self.has_tied_head,
            "vocab_size": self.vocab_size,
            "eos_token_id": _EOS if self.vocab_size > _EOS and not self.has_texts else self.vocab_size - 1,
            "torch_dtype": "bfloat16",
            **({} if self.latent is not None else {"head_dim": self.head_dim}),
            **self.fields,
        }


_SILU = {"hidden_act": "silu"}
QWEN3: dict[str, Any] = {
    **_SILU,
    "model_type": "qwen3",
    "attention_bias": False,
    "max_position_embeddings": 40_960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000,
}


LLAMA: dict[str, Any] = {
    **_SILU,
    "model_type": "llama",
    "attention_bias": False,
    "mlp_bias": False,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
}
QWEN2: dict[str, Any] = {
    **_SILU,
    "model_type": "qwen2",
    "max_position_embeddings": 32_768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000.0,
    "use_sliding_window": False,
}
_AWQ: dict[str, Any] = {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm", "zero_point": True}
_AWQ_BITS = 4 + (16 + 4) / _AWQ["group_size"]  # of a number, with its share of a scale and a zero
_FP8_BLOCKS: dict[str, Any] = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
}


def _qwen3(*dimensions: int, quantization_config: Mapping[str, Any] | None = None, **more: Any) -> Shape:
    """hidden_size, num_layers, num_heads and intermediate_size."""
    hidden_size, num_layers, num_heads, intermediate_size = dimensions
    fields = QWEN3 if quantization_config is None else {**QWEN3, "quantization_config": quantization_config}
    return Shape(
        "Qwen3ForCausalLM", hidden_size, num_layers, num_heads, 8, 128, intermediate_size, fields=fields, **more
    )


def _llama3(factor: float) -> dict[str, Any]:
    rope = {"rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    return {
        **LLAMA,
        "rope_theta": 500_000.0,
        "rope_scaling": {**rope, "original_max_position_embeddings": 8192},
    }


_EMBEDDINGS = "model.embed_tokens", "lm_head"
_BUT_ROUTERS = {"modules_to_not_convert": ["mlp.gate"]}
_QWEN3_30B = Shape(  # Qwen3-30B-A3B
    "Qwen3MoeForCausalLM",
    *(2048, 48, 32, 4, 128, 6144),
    experts=Experts(128, 8, 768),
    fields={
        **QWEN3,
        "model_type": "qwen3_moe",
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
)

SHAPES = {
    "0.6b": _qwen3(1024, 28, 16, 3072, has_tied_head=True),
    "8b": _qwen3(4096, 36, 32, 12288),
    "8b-fp8": _qwen3(4096, 36, 32, 12288, quantization="fp8", layer_bits=8),
    "8b-fp8-kv": _qwen3(4096, 36, 32, 12288, quantization="fp8", layer_bits=8, kv_cache_dtype="fp8"),
    # As Qwen3-8B-FP8 is published.
    "8b-fp8-blocks": _qwen3(4096, 36, 32, 12288, layer_bits=8 + 32 / 128**2, quantization_config=_FP8_BLOCKS),
    "8b-awq": _qwen3(4096, 36, 32, 12288, layer_bits=_AWQ_BITS, quantization_config=_AWQ),
    # The layers of 0.6b, and a vocabulary that a tokenizer was trained to on text.
    "v32k": _qwen3(
        1024, 28, 16, 3072, has_tied_head=True, vocab_size=NUM_TRAINED + len(SPECIAL_TOKENS), has_texts=True
    ),
    "8b-text": _qwen3(4096, 36, 32, 12288, has_texts=True),
    "llama-1b": Shape(  # Llama-3.2-1B
        "LlamaForCausalLM", 2048, 16, 32, 8, 64, 8192, vocab_size=128_256, has_tied_head=True, fields=_llama3(32.0)
    ),
    "llama-8b": Shape(  # Llama-3.1-8B
        "LlamaForCausalLM", 4096, 32, 32, 8, 128, 14_336, vocab_size=128_256, fields=_llama3(8.0)
    ),
    "qwen-7b": Shape(  # Qwen2.5-7B
        "Qwen2ForCausalLM",
        *(3584, 28, 28, 4, 128, 18_944),
        vocab_size=152_064,
        fields=QWEN2,
    ),
    "30b-a3b": _QWEN3_30B,
    "30b-a3b-awq": replace(
        _QWEN3_30B, layer_bits=_AWQ_BITS, fields={**_QWEN3_30B.fields, "quantization_config": _AWQ | _BUT_ROUTERS}
    ),
    "gemma-4b": Shape(  # Gemma 3 4B, its text
        "Gemma3ForCausalLM",
        *(2560, 34, 8, 4, 256, 10_240),
        vocab_size=262_208,
        has_tied_head=True,
        window=1024,
        num_full_layers=5,
        fields={
            "model_type": "gemma3_text",
            "hidden_activation": "gelu_pytorch_tanh",
            "attention_bias": False,
            "max_position_embeddings": 131_072,
            "query_pre_attn_scalar": 256,
            "rms_norm_eps": 1e-6,
            "rope_local_base_freq": 10_000.0,
            "rope_theta": 1_000_000.0,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
            "sliding_window": 1024,
            "sliding_window_pattern": 6,
        },
    ),
    "v2-lite": Shape(  # DeepSeek-V2-Lite
        "DeepseekV2ForCausalLM",
        *(2048, 27, 16, 16, 192, 10_944),
        vocab_size=102_400,
        experts=Experts(64, 6, 1408, shared_size=2 * 1408, num_dense_layers=1),
        latent=Latent(rank=512, rotated_dims=64, plain_dims=128, value_dims=128),
        fields={
            **_SILU,
            "model_type": "deepseek_v2",
            "attention_bias": False,
            "first_k_dense_replace": 1,
            "kv_lora_rank": 512,
            "max_position_embeddings": 163_840,
            "moe_intermediate_size": 1408,
            "moe_layer_freq": 1,
            "n_group": 1,
            "n_routed_experts": 64,
            "n_shared_experts": 2,
            "norm_topk_prob": False,
            "num_experts_per_tok": 6,
            "q_lora_rank": None,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "rms_norm_eps": 1e-6,
            "rope_theta": 10_000,
            "rope_scaling": {
                "type": "yarn",
                "factor": 40,
                "beta_fast": 32,
                "beta_slow": 1,
                "mscale": 0.707,
                "mscale_all_dim": 0.707,
                "original_max_position_embeddings": 4096,
            },
            "routed_scaling_factor": 1.0,
            "scoring_func": "softmax",
            "topk_group": 1,
            "topk_method": "greedy",
            "v_head_dim": 128,
        },
    ),
    "gpt-oss-20b": Shape(  # with experts of 4-bit floats, as it is published
        "GptOssForCausalLM",
        *(2880, 24, 64, 8, 64, 2880),
        vocab_size=201_088,
        experts=Experts(32, 4, 2880),
        expert_bits=4 + 8 / 32,
        window=128,
        num_full_layers=12,
        fields={
            **_SILU,
            "model_type": "gpt_oss",
            "attention_bias": True,
            "experts_per_token": 4,
            "initial_context_length": 4096,
            "layer_types": ["sliding_attention", "full_attention"] * 12,
            "max_position_embeddings": 131_072,
            "num_experts_per_tok": 4,
            "num_local_experts": 32,
            "quantization_config": {
                "quant_method": "mxfp4",
                "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", *_EMBEDDINGS],
            },
            "rms_norm_eps": 1e-5,
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 32.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "original_max_position_embeddings": 4096,
                "truncate": False,
            },
            "rope_theta": 150_000,
            "sliding_window": 128,
            "swiglu_limit": 7.0,
        },
    ),
}


def write_shape(directory: Path, shape: Shape) -> None:
    """The configuration and a tokenizer in which every id has a text."""
    (directory / "config.json").write_text(json.dumps(shape.config), "utf-8")
    if shape.has_texts:
        _text_tokenizer(shape.vocab_size).save(str(directory / "tokenizer.json"))
    else:
        write_tokenizer(directory, shape.vocab_size)
    described: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": _CHAT_TEMPLATE}
    if shape.has_texts:
        described |= {"eos_token": SPECIAL_TOKENS[2], "pad_token": SPECIAL_TOKENS[0]}
    (directory / "tokenizer_config.json").write_text(json.dumps(described), "utf-8")


def _train_tokenizer() -> Tokenizer:
    """Byte-level BPE of the sources that come with Python: no download, and text that has structure."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=NUM_TRAINED, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(_sources(), trainer)
    if tokenizer.get_vocab_size() != NUM_TRAINED:
        raise SystemExit(f"Python's sources here make only {tokenizer.get_vocab_size()} tokens of {NUM_TRAINED}")
    return tokenizer


def _text_tokenizer(vocab_size: int) -> Tokenizer:
    """Entries that no text is made of fill the vocabulary up, so that every id that is sampled has a text."""
    described = json.loads(_train_tokenizer().to_str())
    num_entries = vocab_size - len(SPECIAL_TOKENS)
    described["model"]["vocab"] |= {f"Ġid{token_id}": token_id for token_id in range(NUM_TRAINED, num_entries)}
    tokenizer = Tokenizer.from_str(json.dumps(described))
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    return tokenizer


def _sources() -> Iterator[str]:
    for path in islice(sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py")), _NUM_SOURCES):
        yield path.read_text("utf-8", errors="ignore")
