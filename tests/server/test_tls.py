"""TLS of the server itself: who is let in, certificates that change under way, and handshakes that never end."""

import json
import os
import shutil
import socket
import ssl
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import pytest

from engine.config import load_config
from engine.settings.sections import ServerSection
from engine.types.errors import ConfigError
from server.http.tls import LOOK_EVERY_S, Tls
from tests.pace import far
from tests.server.live_server import MODEL, LiveServer

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed")
BODY = json.dumps({"model": MODEL, "prompt": "p"}).encode()


def made(folder: Path, name: str) -> tuple[Path, Path]:
    """A certificate of its own authority, and its key."""
    cert, key = folder / f"{name}.pem", folder / f"{name}.key"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-keyout", str(key), "-out", str(cert), "-days", "2", "-subj", f"/CN={name}"]
    command += ["-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run(command, check=True, capture_output=True)
    return cert, key


def section(folder: Path, **more: str) -> ServerSection:
    cert, key = made(folder, "first")
    return ServerSection(tls_cert=str(cert), tls_key=str(key), client_timeout_s=1.0, **more)


def ask(port: int, trusted: Path, own: tuple[Path, Path] | None = None) -> bytes:
    context = ssl.create_default_context(cafile=str(trusted))
    if own is not None:
        context.load_cert_chain(*own)
    with (
        socket.create_connection(("127.0.0.1", port), timeout=far(5)) as plain,
        context.wrap_socket(plain, server_hostname="127.0.0.1") as wire,
    ):
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(BODY)}"
        )
        wire.sendall(f"{head}\r\nConnection: close\r\n\r\n".encode() + BODY)
        answer = b""
        while chunk := wire.recv(1 << 16):
            answer += chunk
    return answer


def test_a_server_with_a_certificate_speaks_https_alone(tmp_path: Path) -> None:
    server = section(tmp_path)
    with LiveServer(server=server) as live:
        assert ask(live.port, Path(server.tls_cert)).startswith(b"HTTP/1.1 200 ")
        with socket.create_connection(("127.0.0.1", live.port), timeout=far(5)) as plain:
            plain.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            assert b"HTTP/1.1 200" not in plain.recv(100)


def test_clients_need_a_certificate_where_an_authority_is_named(tmp_path: Path) -> None:
    known, stranger = made(tmp_path, "client"), made(tmp_path, "stranger")
    server = section(tmp_path, tls_client_ca=str(known[0]))
    with LiveServer(server=server) as live:
        assert ask(live.port, Path(server.tls_cert), known).startswith(b"HTTP/1.1 200 ")
        for own in (None, stranger):
            answer = b""
            with suppress(ssl.SSLError, ConnectionError):  # or the connection just ends
                answer = ask(live.port, Path(server.tls_cert), own)
            assert answer == b""


def test_a_changed_certificate_is_read_again_and_one_that_does_not_fit_changes_nothing(tmp_path: Path) -> None:
    server = section(tmp_path)
    first = shutil.copy(server.tls_cert, tmp_path / "trusted.pem")
    cert, key = made(tmp_path, "second")
    with LiveServer(server=server) as live:
        os.replace(shutil.copy(cert, tmp_path / "half"), server.tls_cert)  # and its key is not there yet
        time.sleep(LOOK_EVERY_S * 1.5)
        assert ask(live.port, Path(first)).startswith(b"HTTP/1.1 200 ")
        os.replace(shutil.copy(key, tmp_path / "half"), server.tls_key)
        deadline = time.monotonic() + far(10)
        while True:
            try:
                assert ask(live.port, cert).startswith(b"HTTP/1.1 200 ")
                break
            except ssl.SSLError:
                assert time.monotonic() < deadline
                time.sleep(0.1)
        with pytest.raises(ssl.SSLError):
            ask(live.port, Path(first))


def test_a_changed_authority_of_clients_is_read_again_and_the_old_one_is_trusted_no_more(tmp_path: Path) -> None:
    before, after = made(tmp_path, "before"), made(tmp_path, "after")
    authority = Path(shutil.copy(before[0], tmp_path / "authority.pem"))
    server = section(tmp_path, tls_client_ca=str(authority))

    def is_let_in(own: tuple[Path, Path]) -> bool:
        with suppress(ssl.SSLError, ConnectionError):  # or the connection just ends
            return ask(live.port, Path(server.tls_cert), own).startswith(b"HTTP/1.1 200 ")
        return False

    with LiveServer(server=server) as live:
        assert (is_let_in(before), is_let_in(after)) == (True, False)
        os.replace(shutil.copy(after[0], tmp_path / "half"), authority)
        deadline = time.monotonic() + far(10)
        while not is_let_in(after):
            assert time.monotonic() < deadline
            time.sleep(0.1)
        assert not is_let_in(before)


def test_a_handshake_that_never_ends_is_cut(tmp_path: Path) -> None:
    with (
        LiveServer(server=section(tmp_path)) as live,
        socket.create_connection(("127.0.0.1", live.port), timeout=far(20)) as silent,
    ):
        started = time.monotonic()
        with suppress(ConnectionError):
            assert silent.recv(1) == b""
        assert time.monotonic() - started < far(5)


def test_files_that_cannot_be_used_end_the_start(tmp_path: Path) -> None:
    (cert, key), (other, _) = made(tmp_path, "one"), made(tmp_path, "other")
    for wrong, said in (
        ({"tls_cert": str(other), "tls_key": str(key)}, "expected PEM files that fit each other"),
        ({"tls_cert": str(tmp_path / "none"), "tls_key": str(key)}, "No such file"),
        ({"tls_cert": str(cert), "tls_key": str(key), "tls_client_ca": str(tmp_path / "none")}, "tls_client_ca"),
    ):
        with pytest.raises(ConfigError, match=said):
            Tls(ServerSection(**wrong))
    for one in ("tls_cert", "tls_key", "tls_client_ca"):
        with pytest.raises(ConfigError, match="go together"):
            load_config(None, [f"server.{one}=a.pem"], {})
