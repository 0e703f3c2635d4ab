"""Who calls. API keys come later; this is the one place that will know them."""

from collections.abc import Mapping

DEFAULT_TENANT = ""


class OpenDoor:
    """Lets everybody in as the default tenant; an `Authorization` header is not looked at."""

    def authenticate(self, headers: Mapping[str, str]) -> str:  # noqa: ARG002  (the keyed one reads them)
        """The tenant that a call with these headers is served for."""
        return DEFAULT_TENANT
