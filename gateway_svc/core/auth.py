"""Callers, and what each may do."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Protocol

import msgspec

from contract.domain.api_keys import TENANT_HEADER, TENANT_PATTERN, hash_api_key, is_tenant
from contract.domain.errors import ErrorCode, PenstockError, invalid

_BEARER = re.compile(r"bearer +(\S+) *", re.IGNORECASE)
_NOT_AN_ENTRY = (
    "is not an API key: give a JSON object with tenant (1 to 64 of A-Z, a-z, 0-9, '.', '_', '-') and sha256 (64 "
    "hexadecimal digits, lower case), and if wanted name (text), min_priority (32-bit integer), and rpm, tpm and "
    "max_running (integers, 1 or more); "
    "`penstock keys new` makes one"
)


API_KEY_HEADER = "x-api-key"
KEY_BYTES = 8  # of its SHA-256, by which the pool knows a key


@dataclass(frozen=True, slots=True)
class KeyLimits:
    """The limits of an API key; 0: none."""

    key: bytes  # the first bytes of its SHA-256
    label: str  # what people call it
    rpm: int = 0  # calls in a minute
    tpm: int = 0  # tokens in a minute
    max_running: int = 0  # requests that have not ended


@dataclass(frozen=True, slots=True)
class Caller:
    """A caller."""

    tenant: str = ""
    min_priority: int | None = None  # none: any
    limits: KeyLimits | None = None  # none: no limits

    def priority(self, asked: int) -> int:
        """The priority that a request gets which asked for this one: lower is served first, the bound is the lowest."""
        return asked if self.min_priority is None else max(asked, self.min_priority)


class Authenticator(Protocol):
    """Lets callers in."""

    def authenticate(self, headers: Mapping[str, str]) -> Caller:
        """Find the caller by these headers, whose names are in lower case.

        Raises:
            PenstockError: UNAUTHENTICATED, INVALID_ARGUMENT; it says nothing of what was sent.
        """
        ...


class NoAuthentication:
    """Lets everybody in as the default tenant; an `Authorization` header is not looked at."""

    def authenticate(self, headers: Mapping[str, str]) -> Caller:  # noqa: ARG002  (the keyed one reads them)
        """Implement `Authenticator`."""
        return Caller()


class HeaderAuthenticator:
    """Lets everybody in as the tenant that a header names, without one as the default tenant.

    Right only behind a proxy that knows its callers, sets the header and lets no caller of its own set it.
    """

    def authenticate(self, headers: Mapping[str, str]) -> Caller:
        """Implement `Authenticator`."""
        # Of HTTP there may be several of one name: then a caller's stands beside the proxy's.
        given = [value for name, value in headers.items() if name == TENANT_HEADER]
        if not given:
            return Caller()
        if len(given) > 1 or not is_tenant(given[0]):
            raise invalid(
                f"{TENANT_HEADER} must be given once, as 1 to 64 of A-Z, a-z, 0-9, '.', '_' and '-'", TENANT_HEADER
            )
        return Caller(given[0])


class KeyAuthenticator:
    """Lets in who has a key.

    Keys are found by their hash: how long that takes depends on bits that nobody can choose without knowing a key, so
    it tells nothing of one.
    """

    def __init__(self, callers: Mapping[bytes, Caller]) -> None:
        self.callers = callers  # by SHA-256 of the key; replaced as a whole when keys change

    def authenticate(self, headers: Mapping[str, str]) -> Caller:
        """Implement `Authenticator`."""
        caller = self.callers.get(hash_api_key(_key(headers)))
        if caller is None:
            raise _refused("the API key is not one of this gateway's: correct it or ask the operator for one")
        return caller


def _key(headers: Mapping[str, str]) -> str:
    """The key of a caller: of its Authorization header, or where it has none as Anthropic's clients send it."""
    given = headers.get("authorization")
    if given is None:
        key = headers.get(API_KEY_HEADER)
        if key is None:
            raise _refused(
                "this gateway asks for an API key: send it as `Authorization: Bearer KEY`, or as `x-api-key: KEY`"
            )
        return key
    bearer = _BEARER.fullmatch(given)
    if bearer is None:
        raise _refused("the Authorization header is not of the form `Bearer KEY`")
    return bearer[1]


_Limit = Annotated[int, msgspec.Meta(ge=1, lt=2**31)]


class _Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One line of a file of keys."""

    tenant: Annotated[str, msgspec.Meta(pattern=TENANT_PATTERN)]
    sha256: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}\Z")]
    name: str = ""  # for people: whose it is
    min_priority: Annotated[int, msgspec.Meta(ge=-(2**31), lt=2**31)] | None = None
    rpm: _Limit | None = None
    tpm: _Limit | None = None
    max_running: _Limit | None = None

    @property
    def limits(self) -> KeyLimits | None:
        """The limits of the key; None: it has none."""
        if not (self.rpm or self.tpm or self.max_running):
            return None
        key, label = bytes.fromhex(self.sha256)[:KEY_BYTES], self.name or f"{self.sha256[:8]}…"
        return KeyLimits(key, label, self.rpm or 0, self.tpm or 0, self.max_running or 0)


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
        callers[digest] = Caller(entry.tenant, entry.min_priority, entry.limits)
    return callers


def _refused(message: str) -> PenstockError:
    return PenstockError(ErrorCode.UNAUTHENTICATED, message)
