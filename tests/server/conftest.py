"""One server for all tests that need nothing special of it."""

from collections.abc import Iterator

import pytest

from tests.server.live_server import LiveServer


@pytest.fixture(scope="package")
def live() -> Iterator[LiveServer]:
    with LiveServer() as server:
        yield server
