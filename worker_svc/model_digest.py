"""Digests of models: workers whose digests are equal give the same tokens, as far as a sample of the weights tells."""

import hashlib
import json
from pathlib import Path

from servicekit.checkpoint.model import Checkpoint
from worker_svc.core.digest import DIGEST_BYTES, digest_of
from worker_svc.stored import StoredTensor, read_header
from worker_svc.weights import weight_files

_NUM_PIECES, _PIECE_BYTES = 64, 256  # of each tensor: spread evenly, the first and the last bytes among them
_UNRELATED = ("_name_or_path", "transformers_version")  # keys of a configuration that say where it comes from


def model_digest(checkpoint: Checkpoint, dtype: str, *, is_dummy: bool = False) -> bytes:
    """Return the digest of a checkpoint: of its configuration, and of the name, type, shape and sampled bytes of each
    tensor, however they are spread over files. A sample of 16 KiB tells fine-tunes of one base apart; a checkpoint in
    which a few rows were exchanged may look like the other.

    Args:
        checkpoint: its files.
        dtype: in which it is computed, and what else of how it is kept makes other tokens.
        is_dummy: whether the weights are random ones.

    Raises:
        PenstockError: INTERNAL, naming the file that is missing or corrupt.
    """
    config = {key: value for key, value in checkpoint.config.items() if key not in _UNRELATED}
    told = json.dumps(config, sort_keys=True)
    if is_dummy:
        return digest_of("dummy", dtype, told)
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    digest.update(repr((dtype, told)).encode())
    files = weight_files(checkpoint.directory)
    stored = {name: (path, each) for path in files for name, each in read_header(path).items()}
    for name, (path, tensor) in sorted(stored.items()):
        digest.update(repr((name, tensor.dtype, tensor.shape)).encode())
        digest.update(_sample(path, tensor))
    return digest.digest()


def _sample(path: Path, tensor: StoredTensor) -> bytes:
    """Bytes of a tensor, all of it if it is small."""
    with path.open("rb", buffering=0) as file:
        if tensor.num_bytes <= _NUM_PIECES * _PIECE_BYTES:
            file.seek(tensor.begin)
            return file.read(tensor.num_bytes)
        last = tensor.num_bytes - _PIECE_BYTES
        pieces = []
        for index in range(_NUM_PIECES):
            file.seek(tensor.begin + last * index // (_NUM_PIECES - 1))
            pieces.append(file.read(_PIECE_BYTES))
        return b"".join(pieces)
