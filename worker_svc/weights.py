"""Fills a model's tensors from safetensors files: each rank reads only its part, in any float dtype."""

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from contract.domain.errors import broken
from servicekit.checkpoint.model import read_json
from worker_svc.core.formats.int4 import even_scales
from worker_svc.core.formats.interface import Tensors
from worker_svc.core.formats.words import WORD
from worker_svc.core.layers.placement import Conversion, WantedTensor, convert_together
from worker_svc.core.models.media import text_tensor
from worker_svc.stored import DTYPES, FLOATS, StoredTensor, read_header
from worker_svc.weight_reading import TensorLoad, carry, progress

_SINGLE_FILE = "model.safetensors"
_PICKLES = ("*.bin", "*.pt", "*.pth")
_INDEX = "model.safetensors.index.json"
_RANDOM_DEVIATION = 0.02
_COMPARED_BYTES = 1 << 24  # at once
_CONVERTED_BYTES = 1 << 28  # in memory at once, as they are stored
# Of what is made by the same calls, which need many times as much meanwhile: a CPU's caches keep little.
_TOGETHER_BYTES = {"cpu": 1 << 16, "cuda": 1 << 24}
_BASE = "model."  # the part of a causal model that embeddings are made with: some checkpoints have it alone
_FP8 = "F8_E4M3"
_DERIVED = (".rotary_emb.inv_freq",)  # buffers that old checkpoints carry; computed here


def load_weights(
    directory: Path,
    wanted: Sequence[WantedTensor],
    conversions: Sequence[Conversion] = (),
    *,
    is_text_alone: bool = False,
    unused: Collection[str] = (),
    unused_prefixes: tuple[str, ...] = (),
    unused_suffixes: tuple[str, ...] = (),
) -> int:
    """Fill all that is wanted from the checkpoint in `directory`, converting to the destinations' dtypes; the bytes
    that were read. Nothing is copied before all tensors are known to be there and to fit.

    conversions: what is made of stored tensors; of these only some are in memory at a time.
    is_text_alone: see `read_headers`.
    unused: tensors that are left out if they are there, as a head that shares the embedding's weight (`has_own_head`);
        with `unused_prefixes` all whose names begin so, with `unused_suffixes` those that are not wanted and end so.

    Raises:
        PenstockError: INTERNAL (the operator's fault), naming the file and the tensor: a file is missing or corrupt, a
            tensor is missing, unexpected, misshapen or not of floats.
    """
    by_name: dict[str, list[WantedTensor]] = defaultdict(list)
    for tensor in (*wanted, *(part for each in conversions for part in each.stored.values())):
        by_name[tensor.name].append(tensor)
    remaining = dict(by_name)
    loads: dict[int, TensorLoad] = {}  # by the identity of what is wanted
    headers = read_headers(directory, is_text_alone=is_text_alone)
    prefix = _left_out({name for header in headers.values() for name in header}, by_name)
    for path, header in headers.items():
        for stored_name, stored in header.items():
            name = prefix + stored_name
            if name.endswith(_DERIVED) or name in unused or name.startswith(unused_prefixes):
                continue
            parts = remaining.pop(name, None)
            if parts is None:
                if name not in by_name and name.endswith(unused_suffixes):
                    continue
                what = "twice" if name in by_name else "a tensor that the model does not have"
                raise broken(f"{path} holds {name}, {what}")
            for tensor in parts:
                _check(tensor, stored, f"{name} in {path}")
                loads[id(tensor)] = TensorLoad(path, stored, tensor)
    if remaining:
        names = sorted(remaining)
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        raise broken(f"{directory} lacks the tensor {names[0]}{more}")
    with progress(loads.values()) as bar:
        num_bytes = carry([loads[id(tensor)] for tensor in wanted], bar)
        for batch in _batches(conversions, _CONVERTED_BYTES):
            num_bytes += _convert(batch, loads, bar)
    if conversions and conversions[0].device.type == "cuda":
        torch.cuda.empty_cache()  # of what was read and converted
    return num_bytes


def _batches(
    conversions: Iterable[Conversion], most_bytes: int, *, are_alike: bool = False
) -> Iterator[list[Conversion]]:
    """Those that come to so many bytes as they are stored, in order; with `are_alike` such as can be made together."""
    batch: list[Conversion] = []
    num_bytes = 0
    for conversion in conversions:
        size = sum(each.destination.nbytes for each in conversion.stored.values())
        is_full = num_bytes + size > most_bytes or (are_alike and batch and not batch[0].is_like(conversion))
        if batch and is_full:
            yield batch
            batch, num_bytes = [], 0
        batch.append(conversion)
        num_bytes += size
    if batch:
        yield batch


@torch.inference_mode()
def _convert(batch: list[Conversion], loads: dict[int, TensorLoad], bar: "tqdm[Any]") -> int:
    """Read what is stored and make weights of it; the bytes that were read."""
    reading: list[TensorLoad] = []
    read: list[tuple[list[Conversion], Tensors]] = []
    device = batch[0].device
    for alike in _batches(batch, _TOGETHER_BYTES[device.type], are_alike=True):
        tensors: Tensors = {
            suffix: torch.empty((len(alike), *each.destination.shape), dtype=each.destination.dtype, device=device)
            for suffix, each in alike[0].stored.items()
        }
        for place, conversion in enumerate(alike):
            for suffix, wanted in conversion.stored.items():
                own = replace(wanted, destination=tensors[suffix][place])
                reading.append(replace(loads[id(wanted)], wanted=own))
        read.append((alike, tensors))
    num_bytes = carry(reading, bar)
    for alike, tensors in read:
        convert_together(alike, tensors)
    return num_bytes


def _left_out(stored: Collection[str], wanted: Collection[str]) -> str:
    """The beginning of the wanted names that the stored ones do without; empty: they have it, or are others."""
    has_base_alone = not any(name in wanted for name in stored) and any(_BASE + name in wanted for name in stored)
    return _BASE if has_base_alone else ""


def read_headers(directory: Path, *, is_text_alone: bool = False) -> dict[Path, dict[str, StoredTensor]]:
    """The tensors of a checkpoint, by file and name.

    is_text_alone: of a model of several media those of its text, as a text model calls them.

    Raises:
        PenstockError: INTERNAL (the operator's fault): a file is missing or corrupt.
    """
    headers = {path: read_header(path) for path in weight_files(directory)}
    if not is_text_alone:
        return headers
    return {
        path: {text: stored for name, stored in header.items() if (text := text_tensor(name)) is not None}
        for path, header in headers.items()
    }


def has_own_head(directory: Path, embedding: str, head: str, *, is_text_alone: bool = False) -> bool:
    """Return whether a head is stored that is not the embedding: then it is used, whatever the configuration says.

    is_text_alone: see `read_headers`.

    Raises:
        PenstockError: INTERNAL (the operator's fault): a file is missing or corrupt.
    """
    names = f"{embedding}.weight", f"{head}.weight"
    found: dict[str, tuple[Path, StoredTensor]] = {}
    for path, header in read_headers(directory, is_text_alone=is_text_alone).items():
        found |= {name: (path, stored) for name, stored in header.items() if name in names}
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
        elif tensor.destination.dtype == WORD:
            tensor.destination.random_(-(1 << 31), (1 << 31) - 1)
        elif tensor.name.endswith(".scales_and_zeros"):
            tensor.destination.copy_(even_scales(tensor.destination, _RANDOM_DEVIATION))
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
    wanted = tensor.destination.dtype
    expected = FLOATS if wanted.is_floating_point else {name for name, dtype in DTYPES.items() if dtype == wanted}
    if stored.dtype not in expected:
        raise broken(f"{where} is of {stored.dtype}, expected one of {', '.join(sorted(expected))}")
    if (stored.dtype == _FP8) != (DTYPES[_FP8] == wanted):
        raise broken(f"{where} is of {stored.dtype}, which the configuration (quantization_config) does not mean")
