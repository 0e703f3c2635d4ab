"""TLS of the clients."""

from dataclasses import dataclass
from pathlib import Path

import grpc

from contract.domain.errors import invalid


@dataclass(frozen=True, slots=True)
class ClientTls:
    """PEM files; None: the authorities that gRPC knows, and no certificate of one's own."""

    ca: Path | str | None = None  # who must have signed the gateway's certificate
    cert: Path | str | None = None  # what is shown to a gateway that asks for it
    key: Path | str | None = None

    def credentials(self) -> grpc.ChannelCredentials:
        """For a channel.

        Raises:
            PenstockError: INVALID_ARGUMENT: a file cannot be read, or one of `cert` and `key` is missing.
        """
        if (self.cert is None) != (self.key is None):
            raise invalid("give both a certificate and its key, or neither", "tls")
        try:
            ca, key, cert = (
                None if path is None else Path(path).read_bytes() for path in (self.ca, self.key, self.cert)
            )
        except OSError as error:
            raise invalid(f"a TLS file cannot be read: {error}", "tls") from error
        return grpc.ssl_channel_credentials(ca, key, cert)
