"""Ids of the parts of an output: whichever gateway tells of one gives it the same."""

import hashlib

_ID_BYTES = 12


def part_id(prefix: str, request_id: bytes, index: int) -> str:
    """The id of a part.

    Args:
        prefix: by which its kind is known.
        request_id: of the request, 16 bytes.
        index: of the part among those of the output.
    """
    place = b"part" + index.to_bytes(4, "little")
    return prefix + hashlib.blake2b(request_id + place, digest_size=_ID_BYTES).hexdigest()
