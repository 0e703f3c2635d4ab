"""Fills a model's shards from safetensors files: each rank reads only its part, in any float dtype."""

from collections.abc import Mapping
from pathlib import Path

from worker_svc.checkpoint import broken, read_json
from worker_svc.core.layers.placement import Shard
from worker_svc.lanes import Load, carry
from worker_svc.stored import FLOATS, StoredTensor, read_header

_SINGLE_FILE = "model.safetensors"
_PICKLES = ("*.bin", "*.pt", "*.pth")
_INDEX = "model.safetensors.index.json"
_RANDOM_DEVIATION = 0.02
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_COMPARED_BYTES = 1 << 24  # at once
_DERIVED = (".rotary_emb.inv_freq",)  # buffers that old checkpoints carry; computed here


def load_weights(directory: Path, shards: Mapping[str, Shard], *, tied: bool) -> int:
    """Fill every shard from the checkpoint in `directory`, converting to the destination's dtype; the bytes that were
    read. Nothing is copied before all tensors are known to be there and to fit.

    tied: the head shares the embedding's weight; a head that is stored nevertheless is left out (`has_own_head`).

    Raises:
        PenstockError: INTERNAL (the operator's fault), naming the file and the tensor: a file is missing or corrupt, a
            tensor is missing, unexpected, misshapen or not of floats.
    """
    remaining = dict(shards)
    loads = []
    for path in _files(directory):
        for name, stored in read_header(path).items():
            if name.endswith(_DERIVED) or (tied and name == _HEAD):
                continue
            shard = remaining.pop(name, None)
            if shard is None:
                what = "twice" if name in shards else "a tensor that the model does not have"
                raise broken(f"{path} holds {name}, {what}")
            _check(shard, stored, f"{name} in {path}")
            loads.append(Load(path, stored, shard))
    if remaining:
        names = sorted(remaining)
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        raise broken(f"{directory} lacks the tensor {names[0]}{more}")
    return carry(loads)


def has_own_head(directory: Path) -> bool:
    """Return whether a head is stored that is not the embedding: then it is used, whatever the configuration says.

    Raises:
        PenstockError: INTERNAL (the operator's fault): a file is missing or corrupt.
    """
    found: dict[str, tuple[Path, StoredTensor]] = {}
    for path in _files(directory):
        found |= {name: (path, stored) for name, stored in read_header(path).items() if name in {_EMBEDDING, _HEAD}}
    if len(found) < 2:
        return False
    (embedding_path, embedding), (head_path, head) = found[_EMBEDDING], found[_HEAD]
    if (embedding.dtype, embedding.shape) != (head.dtype, head.shape):
        return True
    with embedding_path.open("rb") as embeddings, head_path.open("rb") as heads:
        embeddings.seek(embedding.begin)
        heads.seek(head.begin)
        for begin in range(0, head.num_bytes, _COMPARED_BYTES):
            size = min(_COMPARED_BYTES, head.num_bytes - begin)
            if embeddings.read(size) != heads.read(size):
                return True
    return False


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


def _check(shard: Shard, stored: StoredTensor, where: str) -> None:
    if stored.shape != shard.shape:
        raise broken(f"{where} has shape {list(stored.shape)}, the configuration means {list(shard.shape)}")
    if stored.dtype not in FLOATS:
        raise broken(f"{where} is of {stored.dtype}, expected one of {', '.join(sorted(FLOATS))}")
