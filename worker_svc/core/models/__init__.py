"""The model families: one short file each."""

from worker_svc.core.config import ModelConfig
from worker_svc.core.layers.placement import Placement
from worker_svc.core.models.llama import LlamaForCausalLM
from worker_svc.core.models.qwen2 import Qwen2ForCausalLM
from worker_svc.core.models.qwen3 import Qwen3ForCausalLM

_CLASSES: dict[str, type[LlamaForCausalLM]] = {
    "LlamaForCausalLM": LlamaForCausalLM,
    "Qwen2ForCausalLM": Qwen2ForCausalLM,
    "Qwen3ForCausalLM": Qwen3ForCausalLM,
}


def build_model(config: ModelConfig, placement: Placement, max_model_len: int) -> LlamaForCausalLM:
    """This rank's part of the model, weights not yet loaded: `placement.shards` then says which it wants."""
    return _CLASSES[config.architecture](config, placement, max_model_len)
