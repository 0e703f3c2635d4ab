"""Calls as replies tell them."""

import hashlib

_ID_BYTES = 12


def call_id(request_id: bytes, choice: int, index: int, prefix: str = "call_") -> str:
    """The id of a call: whichever gateway tells of it gives it the same.

    Args:
        request_id: of the request, 16 bytes.
        choice: the sample's index.
        index: of the call among those of the choice.
        prefix: as the API has it.
    """
    place = choice.to_bytes(4, "little") + index.to_bytes(4, "little")
    return prefix + hashlib.blake2b(request_id + place, digest_size=_ID_BYTES).hexdigest()
