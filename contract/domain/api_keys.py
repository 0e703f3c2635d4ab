"""API keys, control tokens and tenants' names, as who makes them, who sends them and who checks them agree on."""

import hashlib
import re

API_KEY_VARIABLE = "PENSTOCK_API_KEY"  # from which commands that call a gateway take their key
API_KEY_BYTES = 32  # of randomness in a key
CONTROL_TOKEN_VARIABLE = "PENSTOCK_CONTROL_TOKEN_FILE"  # names the file of the token, for services and commands
CONTROL_TOKEN_HEADER = "x-penstock-control-token"  # gRPC metadata of who controls services
TENANT_HEADER = "x-penstock-tenant"  # HTTP header or gRPC metadata, where a gateway is told to trust it
TENANT_PATTERN = r"^[A-Za-z0-9._-]{1,64}\Z"
_TENANT = re.compile(TENANT_PATTERN)


def is_tenant(name: str) -> bool:
    """Return whether a tenant may have this name."""
    return _TENANT.fullmatch(name) is not None


def hash_api_key(key: str) -> bytes:
    """SHA-256 of a key: all that a gateway keeps of it.

    Plain, without salt and not slow: those protect what people think up. A key is 256 random bits, so that nobody finds
    it by trying, and no two keys have the same hash.
    """
    return hashlib.sha256(key.encode()).digest()
