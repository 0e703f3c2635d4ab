"""Fills a model's tensors from safetensors files: each rank reads only its part, in any float dtype."""

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

import torch

from contract.domain.errors import broken
from servicekit.checkpoint.model import read_json
from worker_svc.core.layers.placement import WantedTensor
from worker_svc.stored import FLOATS, StoredTensor, read_header
from worker_svc.weight_reading import TensorLoad, carry

_SINGLE_FILE = "model.safetensors"
_PICKLES = ("*.bin", "*.pt", "*.pth")
_INDEX = "model.safetensors.index.json"
_RANDOM_DEVIATION = 0.02
_COMPARED_BYTES = 1 << 24  # at once
_BASE = "model."  # the part of a causal model that embeddings are made with: some checkpoints have it alone
_DERIVED = (".rotary_emb.inv_freq",)  # buffers that old checkpoints carry; computed here


def load_weights(
    directory: Path,
    wanted: Sequence[WantedTensor],
    *,
    unused: Collection[str] = (),
    unused_prefixes: tuple[str, ...] = (),
) -> int:
    """Fill all that is wanted from the checkpoint in `directory`, converting to the destinations' dtypes; the bytes
    that were read. Nothing is copied before all tensors are known to be there and to fit.

    unused: tensors that are left out if they are there, as a head that shares the embedding's weight (`has_own_head`);
        with `unused_prefixes` all whose names begin so.

    Raises:
        PenstockError: INTERNAL (the operator's fault), naming the file and the tensor: a file is missing or corrupt, a
            tensor is missing, unexpected, misshapen or not of floats.
    """
    by_name: dict[str, list[WantedTensor]] = defaultdict(list)
    for tensor in wanted:
        by_name[tensor.name].append(tensor)
    remaining = dict(by_name)
    loads = []
    headers = {path: read_header(path) for path in weight_files(directory)}
    prefix = _left_out({name for header in headers.values() for name in header}, by_name)
    for path, header in headers.items():
        for stored_name, stored in header.items():
            name = prefix + stored_name
            if name.endswith(_DERIVED) or name in unused or name.startswith(unused_prefixes):
                continue
            parts = remaining.pop(name, None)
            if parts is None:
                what = "twice" if name in by_name else "a tensor that the model does not have"
                raise broken(f"{path} holds {name}, {what}")
            for tensor in parts:
                _check(tensor, stored, f"{name} in {path}")
                loads.append(TensorLoad(path, stored, tensor))
    if remaining:
        names = sorted(remaining)
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        raise broken(f"{directory} lacks the tensor {names[0]}{more}")
    return carry(loads)


def _left_out(stored: Collection[str], wanted: Collection[str]) -> str:
    """The beginning of the wanted names that the stored ones do without; empty: they have it, or are others."""
    has_base_alone = not any(name in wanted for name in stored) and any(_BASE + name in wanted for name in stored)
    return _BASE if has_base_alone else ""


def has_own_head(directory: Path, embedding: str, head: str) -> bool:
    """Return whether a head is stored that is not the embedding: then it is used, whatever the configuration says.

    Raises:
        PenstockError: INTERNAL (the operator's fault): a file is missing or corrupt.
    """
    names = f"{embedding}.weight", f"{head}.weight"
    found: dict[str, tuple[Path, StoredTensor]] = {}
    for path in weight_files(directory):
        found |= {name: (path, stored) for name, stored in read_header(path).items() if name in names}
    if len(found) < 2:
        return False
    (embedding_path, one), (head_path, other) = (found[name] for name in names)
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return True
    with embedding_path.open("rb") as embeddings, head_path.open("rb") as heads:
        embeddings.seek(one.begin)
        heads.seek(other.begin)
        for begin in range(0, other.num_bytes, _COMPARED_BYTES):
            size = min(_COMPARED_BYTES, other.num_bytes - begin)
            if embeddings.read(size) != heads.read(size):
                return True
    return False


def fill_randomly(wanted: Iterable[WantedTensor]) -> None:
    """Weights for measuring speed: drawn on the device around zero; norms and scales one, biases zero."""
    for tensor in wanted:
        if tensor.name.endswith("norm.weight"):
            tensor.destination.fill_(1.0)
        elif tensor.name.endswith(".bias"):
            tensor.destination.zero_()
        elif tensor.name.endswith("_scale"):
            tensor.destination.fill_(1.0)
        elif tensor.destination.itemsize == 1:
            drawn = torch.empty_like(tensor.destination, dtype=torch.bfloat16)
            tensor.destination.copy_(drawn.normal_(0.0, _RANDOM_DEVIATION))
        else:
            tensor.destination.normal_(0.0, _RANDOM_DEVIATION)


def weight_files(directory: Path) -> list[Path]:
    """The files that hold a checkpoint's weights.

    Raises:
        PenstockError: INTERNAL (the operator's fault), naming the file that is missing.
    """
    index = directory / _INDEX
    if index.is_file():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise broken(f"{index} has no weight_map")
        files = [directory / name for name in sorted(set(weight_map.values()))]
    else:
        files = [directory / _SINGLE_FILE]
        others = sorted(path.name for pattern in _PICKLES for path in directory.glob(pattern))
        if others and not files[0].is_file():
            raise broken(
                f"{directory} has its weights as {others[0]}, which can run code when it is read; Penstock reads "
                "safetensors alone. Convert them where you trust the checkpoint, with transformers: "
                "AutoModelForCausalLM.from_pretrained(DIR).save_pretrained(NEW_DIR); then copy the tokenizer's files"
            )
    for path in files:
        if not path.is_file():
            raise broken(
                f"{path} is missing: a checkpoint has its weights in {_SINGLE_FILE}, or in files that {_INDEX} names; "
                "fetch it again, and if it has .bin files only, convert them to safetensors with transformers"
            )
    return files


def _check(tensor: WantedTensor, stored: StoredTensor, where: str) -> None:
    if stored.shape != tensor.shape:
        raise broken(f"{where} has shape {list(stored.shape)}, the configuration means {list(tensor.shape)}")
    if stored.dtype not in FLOATS:
        raise broken(f"{where} is of {stored.dtype}, expected one of {', '.join(sorted(FLOATS))}")
    if (FLOATS[stored.dtype].itemsize == 1) != (tensor.destination.itemsize == 1):
        raise broken(f"{where} is of {stored.dtype}, which the configuration (quantization_config) does not mean")
