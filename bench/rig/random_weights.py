"""Writes safetensors files with random weights for the config.json in a folder: `bench.rig.random_weights FOLDER`.

Norms are one, biases zero, all else is drawn around zero, in bf16, on the GPU if there is one.
"""

import json
import struct
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from bench.rig.children import answer
from servicekit.checkpoint.model import read_checkpoint
from worker_svc.core.causal_lm import CausalLM
from worker_svc.core.layers.placement import Placement
from worker_svc.model_config import read_model_config

FILE_BYTES = 2 << 30  # a file is closed when it has become longer
DEVIATION = 0.02
DTYPE = torch.bfloat16


def write(folder: Path) -> int:
    """Writes all files and their index; the bytes of all tensors."""
    placement = Placement(torch.device("meta"), DTYPE)
    CausalLM(read_model_config(read_checkpoint(folder)).decoder, placement, max_model_len=16)
    files: list[dict[str, tuple[int, ...]]] = [{}]
    size = 0
    for name, shape in {shard.name: shard.shape for shard in placement.wanted}.items():
        if size > FILE_BYTES:
            files.append({})
            size = 0
        files[-1][name] = shape
        size += _num_bytes(shape)
    names = [f"model-{number:05}-of-{len(files):05}.safetensors" for number in range(1, len(files) + 1)]
    with ThreadPoolExecutor() as threads:
        list(threads.map(_write_file, [folder / name for name in names], files))
    weight_map = {tensor: name for name, tensors in zip(names, files, strict=True) for tensor in tensors}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}), "utf-8")
    return sum(_num_bytes(shape) for tensors in files for shape in tensors.values())


def _write_file(path: Path, tensors: dict[str, tuple[int, ...]]) -> None:
    described, offset = {}, 0
    for name, shape in tensors.items():
        end = offset + _num_bytes(shape)
        described[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [offset, end]}
        offset = end
    head = json.dumps(described).encode()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(head)) + head)
        for name, shape in tensors.items():
            if name.endswith("norm.weight"):
                made = torch.ones(shape, dtype=DTYPE)
            elif name.endswith(".bias"):
                made = torch.zeros(shape, dtype=DTYPE)
            else:
                made = torch.empty(shape, dtype=DTYPE, device=device).normal_(0.0, DEVIATION).cpu()
            file.write(made.view(torch.uint8).numpy().data)


def _num_bytes(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel() * DTYPE.itemsize


def main() -> None:
    began_s = time.perf_counter()
    num_bytes = write(Path(sys.argv[1]))
    answer(num_bytes=num_bytes, seconds=time.perf_counter() - began_s)


if __name__ == "__main__":
    main()
