"""Checkpoints with scales for keys and values in 8 bits, and transformers over a cache that rounds what it is given: by
plain arithmetic, and by nothing of the worker's.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from checkpoints import Variant, save_checkpoint
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

Scales = Sequence[tuple[float, float]]  # by layer, of keys and of values
# Those of layers that a checkpoint does not name are 1; the last are so small that large numbers are cut.
SCALES: Scales = ((0.11, 0.07), (1.0, 1.0), (0.005, 0.003))
_SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False}


class RoundingCache(DynamicCache):
    """Hands on what comes in as the 8-bit floats that are kept of it."""

    def __init__(self, scales: Scales) -> None:
        super().__init__()
        self._scales = scales

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *rest: Any, **more: Any) -> Any:
        """Implement `Cache.update`."""
        states = (
            ((each / scale).clamp(-448.0, 448.0).to(torch.float8_e4m3fn).float() * scale)
            for each, scale in zip((key_states, value_states), self._scales[layer_idx], strict=True)
        )
        return super().update(*states, layer_idx, *rest, **more)


def save_with_scales(
    directory: Path,
    variant: Variant,
    names: tuple[str, str] = ("k_scale", "v_scale"),
    scales: Scales = SCALES,
) -> PreTrainedModel:
    """A checkpoint with dense weights and the scales of all layers that do not have 1, under such names."""
    model = save_checkpoint(directory, variant)
    add_scales(directory, names, scales)
    return model


def add_scales(directory: Path, names: tuple[str, str] = ("k_scale", "v_scale"), scales: Scales = SCALES) -> None:
    """Store them beside dense weights, as compressed-tensors does."""
    tensors = load_file(directory / "model.safetensors")
    for layer, pair in enumerate(scales):
        for name, scale in zip(names, pair, strict=True):
            if scale != 1.0:
                tensors[f"model.layers.{layer}.self_attn.{name}"] = torch.tensor([scale])
    save_file(tensors, directory / "model.safetensors")
    path = directory / "config.json"
    told = {"quant_method": "compressed-tensors", "config_groups": {}, "kv_cache_scheme": _SCHEME}
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": told}))


def rounded_logprobs(
    model: PreTrainedModel, prompt: Sequence[int], token_ids: Sequence[int], scales: Scales = SCALES
) -> Tensor:
    """f32[tokens, vocab_size] on the CPU: what stands at each token, if keys and values are rounded."""
    ids = torch.tensor([[*prompt, *token_ids]], device=model.device)
    with torch.inference_mode():
        cache = RoundingCache(scales)
        logits = model(ids, past_key_values=cache, use_cache=True, logits_to_keep=len(token_ids) + 1).logits[0, :-1]
    return logits.float().log_softmax(-1).cpu()
