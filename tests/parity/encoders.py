"""Tiny checkpoints of encoders, with the tokenizer of bytes and, if asked for, what sentence-transformers writes."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from byte_tokenizer import write_tokenizer
from transformers import AutoModel, AutoModelForMaskedLM, PreTrainedConfig, PreTrainedModel

from worker_svc.core.transformers_models.tiny import randomize

MAX_POSITIONS = 96
VOCAB_SIZE = 300
_COMMON = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": MAX_POSITIONS,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "cls_token_id": 1,
    "eos_token_id": 2,
    "sep_token_id": 2,
}
_ROBERTA = {"pad_token_id": 1, "bos_token_id": 0, "type_vocab_size": 1}
_DISTILBERT = {"dim": 64, "hidden_dim": 96, "n_layers": 3, "n_heads": 4}
_DEBERTA = {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 16, "type_vocab_size": 0}


@dataclass(frozen=True)
class EncoderCheckpoint:
    """A configuration of transformers', its options and the positions that prompts can have."""

    name: str
    config: str
    options: dict[str, Any] = field(default_factory=dict)
    longest: int = MAX_POSITIONS

    def make_config(self) -> PreTrainedConfig:
        kind = getattr(transformers, f"{self.config}Config")
        config: PreTrainedConfig = kind(**(_COMMON | self.options))
        return config

    @property
    def pad_token_id(self) -> int:
        return int((_COMMON | self.options)["pad_token_id"])


# Positions from 0 and after those of padding, which those of pads have; windows beside layers that see all; rotations;
# distances in buckets; layers that share weights, narrow embeddings.
ENCODERS = (
    EncoderCheckpoint("bert", "Bert"),
    EncoderCheckpoint("xlm_roberta", "XLMRoberta", _ROBERTA, MAX_POSITIONS - 2),
    EncoderCheckpoint("modernbert_windows", "ModernBert", {"local_attention": 8, "global_attn_every_n_layers": 2}),
    EncoderCheckpoint("mpnet_buckets", "MPNet", _ROBERTA, MAX_POSITIONS - 2),
    EncoderCheckpoint("distilbert", "DistilBert", _DISTILBERT),
    EncoderCheckpoint("electra_narrow", "Electra", {"embedding_size": 16}),
    EncoderCheckpoint("deberta_v2", "DebertaV2", _DEBERTA),
    EncoderCheckpoint("albert_shared", "Albert", {"embedding_size": 16}),
)
_BLOCKS = {"block_size": 2, "num_random_blocks": 1, "attention_type": "block_sparse"}
# With what the message says of each.
REFUSED = (
    (EncoderCheckpoint("fnet_mixes", "FNet"), "gives prompts of several lengths in a matrix other hidden states"),
    (EncoderCheckpoint("convbert_convolutions", "ConvBert"), "gives prompts of several lengths in a matrix"),
    (EncoderCheckpoint("big_bird_blocks", "BigBird", _BLOCKS), "gives prompts of several lengths in a matrix"),
    (EncoderCheckpoint("bart", "Bart", {"d_model": 64}), "is an encoder and a decoder"),
    (EncoderCheckpoint("gpt2", "GPT2", {"n_embd": 64, "n_head": 4}), "lets no token see those after it"),
    (EncoderCheckpoint("llama", "Llama"), "lets no token see those after it"),
)


def save_encoder(directory: Path, encoder: EncoderCheckpoint, *, with_head: bool = False) -> PreTrainedModel:
    """An eager model in fp32 of which every part counts, saved into `directory`; it is the model without its head."""
    auto = AutoModelForMaskedLM if with_head else AutoModel
    module: PreTrainedModel = auto.from_config(encoder.make_config(), attn_implementation="eager")
    randomize(module)
    module.eval().save_pretrained(directory)
    write_tokenizer(directory)
    base: PreTrainedModel = module.base_model
    return base


def save_encoder_config(directory: Path, encoder: EncoderCheckpoint) -> None:
    """A checkpoint without weights."""
    config = encoder.make_config()
    config.architectures = [transformers.MODEL_MAPPING[type(config)].__name__]
    config.save_pretrained(directory)


def save_modules(directory: Path, mode: str, *, normalize: bool) -> None:
    """The files that sentence-transformers writes beside a model."""
    names = ["Transformer", "Pooling", *(["Normalize"] if normalize else [])]
    modules = [
        {"idx": index, "name": str(index), "path": f"{index}_{name}", "type": f"sentence_transformers.models.{name}"}
        for index, name in enumerate(names)
    ]
    (directory / "modules.json").write_text(json.dumps(modules))
    (directory / "1_Pooling").mkdir(exist_ok=True)
    (directory / "1_Pooling" / "config.json").write_text(json.dumps({f"pooling_mode_{mode}": True}))


@torch.inference_mode()
def hidden_states(model: PreTrainedModel, prompt: list[int]) -> torch.Tensor:
    """f32[tokens, hidden_size] of a prompt by itself."""
    hidden: torch.Tensor = model(torch.tensor([prompt])).last_hidden_state[0].float()
    return hidden
