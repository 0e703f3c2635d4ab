"""Users and passwords that may change while a process runs: asked for anew before each connection."""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, cast

from contract.domain.errors import invalid
from servicekit.bus.interface import BusUnavailable

if TYPE_CHECKING:  # redis-py takes a fifth of a second to import, and few pools need it
    from redis.credentials import CredentialProvider


@dataclass(frozen=True, slots=True)
class FileCredentials:
    """The password in a file, which whoever rotates it writes again. A redis-py `CredentialProvider` by its shape."""

    path: Path
    username: str = ""

    def get_credentials(self) -> tuple[str] | tuple[str, str]:
        """The user, if there is one, and the password of now.

        Raises:
            OSError: the file cannot be read.
            ValueError: it is not UTF-8.
        """
        password = self.path.read_text("utf-8").strip()
        return (self.username, password) if self.username else (password,)

    async def get_credentials_async(self) -> tuple[str] | tuple[str, str]:
        """The same."""
        return self.get_credentials()


def load_provider(name: str) -> "CredentialProvider":
    """The redis-py provider that `MODULE:NAME`, a class or function, gives when it is called without arguments.

    Raises:
        PenstockError: it cannot be imported or called (the operator's to mend).
    """
    module, colon, attribute = name.partition(":")
    try:
        if not colon:
            raise ValueError("it must be MODULE:NAME")  # noqa: TRY301
        make = cast(Callable[[], "CredentialProvider"], getattr(import_module(module), attribute))
        provider = make()
    except Exception as error:
        raise invalid(f"credential_provider {name!r} cannot be used: {error}", param="bus_url") from error
    if not callable(getattr(provider, "get_credentials", None)):
        raise invalid(f"credential_provider {name!r} gives no redis.CredentialProvider", param="bus_url")
    return provider


def credentials_of(provider: "CredentialProvider | FileCredentials") -> tuple[str, ...]:
    """Its user and password, or its password alone.

    Raises:
        BusUnavailable: it has none at the moment.
    """
    try:
        return tuple(provider.get_credentials())
    except Exception as error:
        raise BusUnavailable(f"the credentials for the bus cannot be had: {error}") from error
