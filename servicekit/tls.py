"""TLS for servers: a certificate and key in files that may be replaced at any time, and whose clients are let in."""

import ssl
import threading
import time
from dataclasses import dataclass
from typing import Any, TypeAlias

import grpc
import structlog

from contract.domain.errors import ErrorCode, PenstockError
from servicekit.tls_files import TlsFiles

CHECK_S = 1.0  # between two looks at the files
_Versions: TypeAlias = tuple[tuple[int, ...], ...]
_logger = structlog.stdlib.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class _Loaded:
    versions: _Versions
    context: ssl.SSLContext
    pems: tuple[bytes, ...]  # of `TlsFiles.paths`


class TlsIdentity:
    """The certificate of this process's servers, and what they ask of their clients. May be used by several threads.

    The files are looked at when somebody connects, at most once a second. What they hold counts for connections that
    begin from then on; files that cannot be used change nothing, which is logged.
    """

    def __init__(self, files: TlsFiles) -> None:
        """Reads the files.

        Raises:
            PenstockError: INTERNAL (the operator's fault): they cannot be used.
        """
        self._files = files
        self._lock = threading.Lock()
        self._looked_s = time.monotonic()
        self._broken: _Versions | None = None  # what was logged last
        try:
            self._loaded = _load(files)
        except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
            raise PenstockError(ErrorCode.INTERNAL, f"the TLS files cannot be used: {_why(files, error)}") from error
        # Whoever connects begins with this one and goes on with the newest.
        self.context = _context(files)
        self.context.sni_callback = self._switch

    def credentials(self) -> grpc.ServerCredentials:
        """For a gRPC server."""
        told = self._loaded

        def changed() -> Any:  # None: nothing; gRPC's stubs do not know it
            nonlocal told
            newest = self._newest()
            if newest is told:
                return None
            told = newest
            return _certificates(newest)

        return grpc.dynamic_ssl_server_credentials(
            _certificates(told), changed, require_client_authentication=self._files.client_ca is not None
        )

    def _switch(self, connection: ssl.SSLObject | ssl.SSLSocket, _name: str | None, _context: ssl.SSLContext) -> None:
        connection.context = self._newest().context

    def _newest(self) -> _Loaded:
        with self._lock:
            now_s = time.monotonic()
            if now_s - self._looked_s >= CHECK_S:
                self._looked_s = now_s
                self._look()
            return self._loaded

    def _look(self) -> None:
        versions: _Versions | None = None
        try:
            versions = _versions(self._files)
            if versions == self._loaded.versions:
                return
            self._loaded = _load(self._files)
        except (OSError, ValueError) as error:
            if self._broken != (versions or ()):
                self._broken = versions or ()
                _logger.error("the TLS files from before stay valid", why=_why(self._files, error))  # noqa: TRY400
            return
        self._broken = None
        _logger.info("TLS files were read again")


def open_identity(files: TlsFiles | None) -> TlsIdentity | None:
    """The identity of a setting; None: no TLS.

    Raises:
        PenstockError: INTERNAL (the operator's fault): the files cannot be used.
    """
    return None if files is None else TlsIdentity(files)


def _load(files: TlsFiles) -> _Loaded:
    versions = _versions(files)  # before they are read: a change from now on is a change
    context = _context(files)
    return _Loaded(versions, context, tuple(path.read_bytes() for path in files.paths))


def _context(files: TlsFiles) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.load_cert_chain(files.cert, files.key, password=_no_password)
    if files.client_ca is not None:
        context.verify_mode = ssl.CERT_REQUIRED
        # Nobody resumes what another certificate, or one of another authority, had begun.
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.num_tickets = 0
        context.load_verify_locations(files.client_ca)
    return context


def _no_password() -> str:
    raise ValueError("the key is encrypted: give one that is not, in a file that only the service may read")


def _certificates(loaded: _Loaded) -> grpc.ServerCertificateConfiguration:
    cert, key, *client_ca = loaded.pems
    return grpc.ssl_server_certificate_configuration([(key, cert)], client_ca[0] if client_ca else None)


def _versions(files: TlsFiles) -> _Versions:
    found = [path.stat() for path in files.paths]
    return tuple((each.st_dev, each.st_ino, each.st_mtime_ns, each.st_ctime_ns, each.st_size) for each in found)


def _why(files: TlsFiles, error: Exception) -> str:
    names = ", ".join(map(str, files.paths))
    return f"{getattr(error, 'strerror', None) or error} ({names})"
