"""Requests that may be sent again: their ids and seeds follow from tenant and key."""

import hashlib
import hmac

from contract.domain.errors import invalid

IDEMPOTENCY_KEY = "idempotency-key"
MAX_KEY_CHARS = 255


def check_key(key: str) -> str:
    """The key, if it can be one.

    Raises:
        PenstockError: INVALID_ARGUMENT.
    """
    if not 1 <= len(key) <= MAX_KEY_CHARS or not all("!" <= character <= "~" for character in key):
        raise invalid(f"{IDEMPOTENCY_KEY} must be 1 to {MAX_KEY_CHARS} visible ASCII characters", IDEMPOTENCY_KEY)
    return key


def derive(tenant: str, key: str, prompt: int) -> tuple[bytes, int]:
    """Id (16 bytes) and seed (unsigned 64-bit) of the request for the call's prompt with this index.

    The seed is for a client that gave none: with one drawn anew, sending it again would ask for something else.
    """
    digest = hmac.digest(tenant.encode(), b"%d:" % prompt + key.encode(), hashlib.sha256)
    return digest[:16], int.from_bytes(digest[16:24], "little")
