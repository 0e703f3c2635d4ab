"""Fills a model's shards from safetensors files: each rank reads only its part, in any float dtype."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from worker_svc.checkpoint import broken, read_json
from worker_svc.core.layers.placement import Shard

_SINGLE_FILE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_FLOATS = {"F64", "F32", "F16", "BF16"}
_RANDOM_DEVIATION = 0.02
_DERIVED = (".rotary_emb.inv_freq",)  # buffers that old checkpoints carry; computed here


def load_weights(directory: Path, shards: Mapping[str, Shard], *, tied: bool) -> None:
    """Fill every shard from the checkpoint in `directory`, converting to the destination's dtype.

    tied: the head shares the embedding's weight; a head that is stored nevertheless is left out.

    Raises:
        PenstockError: INTERNAL (the operator's fault), naming the file and the tensor: a file is missing or corrupt, a
            tensor is missing, unexpected, misshapen or not of floats.
    """
    remaining = dict(shards)
    for path in _files(directory):
        try:
            with safe_open(path, framework="pt", device="cpu") as file:
                for name in file.keys():  # noqa: SIM118  (not a mapping)
                    if name.endswith(_DERIVED) or (tied and name == "lm_head.weight"):
                        continue
                    shard = remaining.pop(name, None)
                    if shard is None:
                        what = "twice" if name in shards else "a tensor that the model does not have"
                        raise broken(f"{path} holds {name}, {what}")
                    _fill(shard, file.get_slice(name), f"{name} in {path}")
        except (SafetensorError, OSError) as error:
            raise broken(f"{path} is corrupt or cannot be read: {error}") from error
    if remaining:
        names = sorted(remaining)
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        raise broken(f"{directory} lacks the tensor {names[0]}{more}")


def fill_randomly(shards: Mapping[str, Shard]) -> None:
    """Weights for measuring speed: drawn on the device around zero, norms one, biases zero."""
    for name, shard in shards.items():
        if name.endswith("norm.weight"):
            shard.destination.fill_(1.0)
        elif name.endswith(".bias"):
            shard.destination.zero_()
        else:
            shard.destination.normal_(0.0, _RANDOM_DEVIATION)


def _files(directory: Path) -> list[Path]:
    index = directory / _INDEX
    if index.is_file():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise broken(f"{index} has no weight_map")
        files = [directory / name for name in sorted(set(weight_map.values()))]
    else:
        files = [directory / _SINGLE_FILE]
    for path in files:
        if not path.is_file():
            raise broken(f"{path} is missing")
    return files


def _fill(shard: Shard, stored: Any, where: str) -> None:
    shape, dtype = tuple(stored.get_shape()), stored.get_dtype()
    if shape != shard.shape:
        raise broken(f"{where} has shape {list(shape)}, the configuration means {list(shard.shape)}")
    if dtype not in _FLOATS:
        raise broken(f"{where} is of {dtype}, expected one of {', '.join(sorted(_FLOATS))}")
    part: torch.Tensor = stored[shard.index]
    shard.destination.copy_(part)
