"""The base of all calls."""

from enum import Enum
from typing import Final, Generic, TypeVar

R = TypeVar("R")


class Call(Generic[R]):
    """A request to the bus whose answer has type R."""

    __slots__ = ()


class Settling(Enum):
    """The answer of a call that a pool puts off while it settles; to be asked again.

    After a restart of the server, which may have lost its last writes, requests are given out only when every gateway
    that lives has said what its clients have, and a second has passed in any case.
    """

    NOT_YET = "not yet"


NOT_YET: Final = Settling.NOT_YET
