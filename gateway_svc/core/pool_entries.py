"""The file of pools: one entry each, checked."""

from typing import Annotated

import msgspec

from contract.domain.request import ID_PREFIXES

NAME_PATTERN = r"^[A-Za-z0-9._-]{1,64}\Z"
_Name = Annotated[str, msgspec.Meta(pattern=NAME_PATTERN)]


class PoolEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One pool. Where it says nothing of its server, that is the gateway's."""

    name: _Name  # in request ids and metrics
    pool: _Name | None = None  # what its services call it; none: by its name
    redis_url: Annotated[str, msgspec.Meta(min_length=1)] | None = None
    redis_password_file: Annotated[str, msgspec.Meta(min_length=1)] | None = None
    num_shards: Annotated[int, msgspec.Meta(ge=1, le=1024)] | None = None
    models: tuple[Annotated[str, msgspec.Meta(min_length=1, max_length=255)], ...] = ()  # none: as workers register

    @property
    def pool_name(self) -> str:
        """The name that its services have for it."""
        return self.pool or self.name

    def is_same_pool(self, other: "PoolEntry") -> bool:
        """Return whether both are one pool, reached the same way; what models are asked for there does not matter."""
        return msgspec.structs.replace(self, models=()) == msgspec.structs.replace(other, models=())


_decoder = msgspec.json.Decoder(PoolEntry)


def parse_pools(content: bytes) -> tuple[PoolEntry, ...]:
    """The entries of a file: a JSON object a line; empty lines and those that begin with # count for nothing.

    Raises:
        ValueError: says which line is wrong, and quotes no URL, for it may hold a password.
    """
    entries: list[PoolEntry] = []
    claimed: dict[tuple[str, str], int] = {}  # line by what only one pool may have
    for number, line in enumerate(content.split(b"\n"), 1):
        text = line.strip()
        if not text or text.startswith(b"#"):
            continue
        try:
            entry = _decoder.decode(text)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            why = str(error) if isinstance(error, msgspec.ValidationError) else "it is no JSON object"
            raise ValueError(
                f"line {number} is not a pool ({why}): give a JSON object with name, and if wanted pool, redis_url, "
                "redis_password_file, num_shards and models"
            ) from None
        if f"{entry.name}-".startswith(ID_PREFIXES):
            raise ValueError(f"line {number}: no pool may be called {entry.name}, as ids of replies begin so")
        claims = [("name", entry.name), ("server and pool", f"{entry.redis_url} {entry.pool_name}")]
        for claim in [*claims, *(("model", each) for each in entry.models)]:
            before = claimed.setdefault(claim, number)
            if before != number:
                raise ValueError(f"line {number} has the {claim[0]} of line {before}: remove one of them")
        entries.append(entry)
    if not entries:
        raise ValueError("it has no pool")
    return tuple(entries)
