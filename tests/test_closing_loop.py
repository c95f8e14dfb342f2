"""The event loop of tests ends, whatever a test has left open."""

import asyncio
import socket

import pytest

from tests.closing_loop import ClosingLoop


def test_a_server_that_is_left_open_is_closed_and_named() -> None:
    loop = ClosingLoop()
    server = loop.run_until_complete(loop.create_server(asyncio.Protocol, "127.0.0.1", 0))
    address = server.sockets[0].getsockname()
    with pytest.raises(ResourceWarning, match="unclosed resource <TCPServer"):
        loop.close()
    assert loop.is_closed()
    with socket.socket() as late:
        assert late.connect_ex(address) != 0


def test_a_loop_with_nothing_open_ends_without_a_word() -> None:
    loop = ClosingLoop()
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()
    assert loop.is_closed()
