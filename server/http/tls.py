"""TLS of the server itself: a certificate, whose clients must have one where an authority is named, read again.

Owns: the context of new connections, and when its files are read again.  Does not know: connections, HTTP.
A pair of files that do not fit each other changes nothing, and the log says so: certificates and keys are replaced one
after the other.
"""

import logging
import os
import ssl

from engine.settings.sections import ServerSection
from engine.types.errors import ConfigError

log = logging.getLogger(__name__)

LOOK_EVERY_S = 1.0


class Tls:
    """The context, for all new connections.  Raises ConfigError for files that cannot be used."""

    def __init__(self, server: ServerSection) -> None:
        self._server = server
        self._marks = self._marked()
        self.context = _context(server)

    def look(self) -> None:
        """Read the files again if they have changed; connections that are open keep what they began with."""
        if (marks := self._marked()) == self._marks:
            return
        self._marks = marks
        try:
            _context(self._server)  # so that a pair that does not fit leaves the one in use whole
            _load(self.context, self._server)
        except ConfigError as error:
            log.error("the certificate stays as it was: %s", error)
        else:
            log.info("%s was read again", self._server.tls_cert)

    def _marked(self) -> list[tuple[int, ...]]:
        """Return marks that change with the files."""
        marks: list[tuple[int, ...]] = []
        for path in (self._server.tls_cert, self._server.tls_key, self._server.tls_client_ca):
            try:
                status = os.stat(path)
            except OSError:
                marks.append(())
            else:
                marks.append((status.st_ino, status.st_mtime_ns, status.st_size))
        return marks


def _context(server: ServerSection) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    _load(context, server)
    return context


def _load(context: ssl.SSLContext, server: ServerSection) -> None:
    """Raises ConfigError."""
    said = f"server.tls_cert={server.tls_cert} server.tls_key={server.tls_key}"
    try:
        context.load_cert_chain(server.tls_cert, server.tls_key, password=_no_password)
        if server.tls_client_ca:
            said = f"server.tls_client_ca={server.tls_client_ca}"
            context.load_verify_locations(server.tls_client_ca)
            context.verify_mode = ssl.CERT_REQUIRED
    except ssl.SSLError as error:
        raise ConfigError(f"{said}: {error.reason or error}; expected PEM files that fit each other") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{said}: {getattr(error, 'strerror', None) or error}") from None


def _no_password() -> str:
    raise ValueError("the key has a password; a server cannot be asked for one: store it without")
