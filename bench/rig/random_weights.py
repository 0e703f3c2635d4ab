"""Writes safetensors files with random weights for the config.json in a folder: `bench.rig.random_weights FOLDER`.

Norms are one, biases zero, all other floats are drawn around zero, in bf16, on the GPU if there is one; of what is
stored in fewer bits these are drawn, and scales are such that weights are about as large. With an exponent after the
folder, tokens choose experts by Zipf's law (`bench.rig.skew`).
"""

import json
import struct
import sys
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path

import torch

from bench.rig.children import answer
from bench.rig.skew import skew_embedding, skew_router
from servicekit.checkpoint.model import read_checkpoint
from worker_svc.core.causal_lm import CausalLM
from worker_svc.core.layers.placement import Placement
from worker_svc.core.models.spec import ExpertsSpec
from worker_svc.model_config import read_model_config

FILE_BYTES = 2 << 30  # a file is closed when it has become longer
DEVIATION = 0.02
DTYPE = torch.bfloat16
_NAMES = {torch.bfloat16: "BF16", torch.int32: "I32", torch.uint8: "U8", torch.float8_e4m3fn: "F8_E4M3"}
_LITTLE = 4  # layers of models with skewed experts add 2^-_LITTLE of what those of others do
_SCALE, _EXPONENT = 0.004, 127 - 7  # of integers of 4 bits and 8-bit floats; of floats of 4 bits


@dataclass(frozen=True)
class _Tensor:
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    def draw(self, skew: "_Skew | None" = None) -> torch.Tensor:
        """On the CPU."""
        drawn = self._draw()
        return drawn if skew is None else skew.apply(self.name, drawn)

    def _draw(self) -> torch.Tensor:
        if self.name.endswith("norm.weight"):
            return torch.ones(self.shape, dtype=self.dtype)
        if self.name.endswith("bias"):
            return torch.zeros(self.shape, dtype=self.dtype)
        if self.name.endswith(("scales", "scale", "scale_inv")):
            value = _SCALE if self.dtype.is_floating_point else _EXPONENT
            return torch.full(self.shape, value, dtype=self.dtype)
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        if self.dtype.is_floating_point:
            drawn = torch.empty(self.shape, dtype=DTYPE, device=device).normal_(0.0, DEVIATION)
            return (drawn / _SCALE).to(self.dtype).cpu() if self.dtype.itemsize == 1 else drawn.cpu()
        drawn = torch.randint(256, (self.num_bytes,), dtype=torch.uint8, device=device)
        return drawn.cpu().view(self.dtype).view(self.shape)


@dataclass(frozen=True)
class _Skew:
    """Experts that are not chosen alike."""

    exponent: float
    routers: Mapping[str, int]  # by the name of its tensor, the experts that a token chooses
    embedding: str

    def apply(self, name: str, drawn: torch.Tensor) -> torch.Tensor:
        """The tensor of this name, out of what was drawn for it."""
        if name == self.embedding:
            return skew_embedding(drawn, DEVIATION)
        if name in self.routers:
            return skew_router(drawn, DEVIATION, self.routers[name], self.exponent, name)
        # Layers add little, and nothing to the first number of a hidden state: it says as much in all layers.
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            drawn[0] = 0
            return drawn * 2.0**-_LITTLE
        if name.endswith(("o_proj.scales", "down_proj.scales")):
            drawn[:, 0] = 0  # of each group of inputs
            return drawn * 2.0**-_LITTLE
        if name.endswith("down_proj_blocks"):
            drawn[:, 0] = 0  # of each expert
        return drawn - _LITTLE if name.endswith("down_proj_scales") else drawn


def write(folder: Path, skew: float = 0.0) -> int:
    """Writes all files and their index; the bytes of all tensors. `skew`: the exponent of Zipf's law by which tokens
    choose experts, of models that keep the names of their layers' outputs as Qwen's, DeepSeek's and gpt-oss do.
    """
    config = read_model_config(read_checkpoint(folder))
    placement = Placement(torch.device("meta"), DTYPE, quantization=config.quantization)
    CausalLM(config.decoder, placement, max_model_len=16)
    files: list[list[_Tensor]] = [[]]
    size = 0
    for tensor in _stored(placement):
        if size > FILE_BYTES:
            files.append([])
            size = 0
        files[-1].append(tensor)
        size += tensor.num_bytes
    decoder = config.decoder
    mixers = [mixer for sublayers in decoder.layers for each in sublayers for mixer in each.mixers]
    routers = {f"{each.router.name}.weight": each.router.top_k for each in mixers if isinstance(each, ExpertsSpec)}
    skewed = _Skew(skew, routers, f"{decoder.embedding}.weight") if skew else None
    names = [f"model-{number:05}-of-{len(files):05}.safetensors" for number in range(1, len(files) + 1)]
    with ThreadPoolExecutor() as threads:
        list(threads.map(_write_file, [folder / name for name in names], files, repeat(skewed)))
    weight_map = {each.name: name for name, tensors in zip(names, files, strict=True) for each in tensors}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}), "utf-8")
    return sum(each.num_bytes for tensors in files for each in tensors)


def _stored(placement: Placement) -> Iterable[_Tensor]:
    """Every tensor of the checkpoint once."""
    wanted = [*placement.wanted, *(each for made in placement.conversions for each in made.stored.values())]
    found = {each.name: _Tensor(each.name, each.shape, _stored_dtype(each.destination.dtype)) for each in wanted}
    return found.values()


def _stored_dtype(dtype: torch.dtype) -> torch.dtype:
    """That of a tensor which is read into one of `dtype`: scales are read as 32-bit floats from any."""
    return DTYPE if dtype.is_floating_point and dtype.itemsize > 1 else dtype


def _write_file(path: Path, tensors: list[_Tensor], skew: _Skew | None) -> None:
    described, offset = {}, 0
    for each in tensors:
        end = offset + each.num_bytes
        described[each.name] = {"dtype": _NAMES[each.dtype], "shape": each.shape, "data_offsets": [offset, end]}
        offset = end
    head = json.dumps(described).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(head)) + head)
        for each in tensors:
            file.write(each.draw(skew).view(torch.uint8).numpy().data)


def main() -> None:
    began_s = time.perf_counter()
    num_bytes = write(Path(sys.argv[1]), *map(float, sys.argv[2:]))
    answer(num_bytes=num_bytes, seconds=time.perf_counter() - began_s)


if __name__ == "__main__":
    main()
