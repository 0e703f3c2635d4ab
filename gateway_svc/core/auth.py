"""Who calls, and what that caller may."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Protocol

import msgspec

from penstock.domain.api_keys import TENANT_HEADER, TENANT_PATTERN, hash_api_key, is_tenant
from penstock.domain.errors import ErrorCode, PenstockError, invalid

_BEARER = re.compile(r"bearer +(\S+) *", re.IGNORECASE)
_NOT_AN_ENTRY = (
    "is not an API key: give a JSON object with tenant (1 to 64 of A-Z, a-z, 0-9, '.', '_', '-') and sha256 (64 "
    "hexadecimal digits, lower case), and if wanted name (text) and min_priority (32-bit integer); "
    "`penstock keys new` makes one"
)


@dataclass(frozen=True, slots=True)
class Caller:
    """Who calls."""

    tenant: str = ""
    min_priority: int | None = None  # none: any

    def priority(self, asked: int) -> int:
        """The priority that a request gets which asked for this one: lower is served first, the bound is the lowest."""
        return asked if self.min_priority is None else max(asked, self.min_priority)


class Door(Protocol):
    """Lets callers in."""

    def authenticate(self, headers: Mapping[str, str]) -> Caller:
        """Who calls with these headers, whose names are in lower case.

        Raises:
            PenstockError: UNAUTHENTICATED, INVALID_ARGUMENT; it says nothing of what was sent.
        """
        ...


class OpenDoor:
    """Lets everybody in as the default tenant; an `Authorization` header is not looked at."""

    def authenticate(self, headers: Mapping[str, str]) -> Caller:  # noqa: ARG002  (the keyed one reads them)
        """See `Door`."""
        return Caller()


class TrustingDoor:
    """Lets everybody in as the tenant that a header names, without one as the default tenant.

    Right only behind a proxy that knows its callers, sets the header and lets no caller of its own set it.
    """

    def authenticate(self, headers: Mapping[str, str]) -> Caller:
        """See `Door`."""
        # Of HTTP there may be several of one name: then a caller's stands beside the proxy's.
        given = [value for name, value in headers.items() if name == TENANT_HEADER]
        if not given:
            return Caller()
        if len(given) > 1 or not is_tenant(given[0]):
            raise invalid(
                f"{TENANT_HEADER} must be given once, as 1 to 64 of A-Z, a-z, 0-9, '.', '_' and '-'", TENANT_HEADER
            )
        return Caller(given[0])


class KeyedDoor:
    """Lets in who has a key.

    Keys are found by their hash: how long that takes depends on bits that nobody can choose without knowing a key, so
    it tells nothing of one.
    """

    def __init__(self, callers: Mapping[bytes, Caller]) -> None:
        self.callers = callers  # by SHA-256 of the key; replaced as a whole when keys change

    def authenticate(self, headers: Mapping[str, str]) -> Caller:
        """See `Door`."""
        given = headers.get("authorization")
        if given is None:
            raise _refused("this gateway asks for an API key: send it as `Authorization: Bearer KEY`")
        bearer = _BEARER.fullmatch(given)
        if bearer is None:
            raise _refused("the Authorization header is not of the form `Bearer KEY`")
        caller = self.callers.get(hash_api_key(bearer[1]))
        if caller is None:
            raise _refused("the API key is not one of this gateway's: correct it or ask the operator for one")
        return caller


class _Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One line of a file of keys."""

    tenant: Annotated[str, msgspec.Meta(pattern=TENANT_PATTERN)]
    sha256: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}\Z")]
    name: str = ""  # for people: whose it is
    min_priority: Annotated[int, msgspec.Meta(ge=-(2**31), lt=2**31)] | None = None


_decoder = msgspec.json.Decoder(_Entry)


def parse_keys(content: bytes) -> dict[bytes, Caller]:
    """The callers of a file of keys: a JSON object a line; empty lines and those that begin with # count for nothing.

    Raises:
        ValueError: says which line is wrong and quotes nothing of it, for it may hold a key by mistake.
    """
    callers: dict[bytes, Caller] = {}
    for number, line in enumerate(content.split(b"\n"), 1):
        text = line.strip()
        if not text or text.startswith(b"#"):
            continue
        try:
            entry = _decoder.decode(text)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            raise ValueError(f"line {number} {_NOT_AN_ENTRY}") from None
        digest = bytes.fromhex(entry.sha256)
        if digest in callers:
            raise ValueError(f"line {number} has the sha256 of a line before: remove one of them")
        callers[digest] = Caller(entry.tenant, entry.min_priority)
    return callers


def _refused(message: str) -> PenstockError:
    return PenstockError(ErrorCode.UNAUTHENTICATED, message)
