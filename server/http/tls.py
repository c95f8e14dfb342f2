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
    """The context of a listener, which every handshake replaces by the newest one, with its authorities.

    Raises ConfigError for files that cannot be used."""

    def __init__(self, server: ServerSection) -> None:
        self._server = server
        self._marks = self._marked()
        self.context = self._newest = _context(server)
        self.context.sni_callback = self._choose  # OpenSSL calls it also for clients that name no server

    def _choose(self, wire: ssl.SSLObject, name: str, context: ssl.SSLContext) -> None:
        wire.context = self._newest

    def look(self) -> None:
        """Read the files again if they have changed; connections that are open keep what they began with."""
        if (marks := self._marked()) == self._marks:
            return
        self._marks = marks
        try:
            # A context keeps every authority that it has loaded, also those that are no longer in the file.
            self._newest = _context(self._server)
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
    """Return a context of the files as they are.  Raises ConfigError."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    # A session that goes on by a ticket is not checked against the authorities of now.
    context.num_tickets = 0
    context.options |= ssl.OP_NO_TICKET
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
    return context


def _no_password() -> str:
    raise ValueError("the key has a password; a server cannot be asked for one: store it without")
