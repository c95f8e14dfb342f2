"""A server for all tests that need nothing special of it, and one for each test that stores something."""

from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from engine.settings.sections import StorageSection
from tests.server.live_server import LiveServer, connect


@pytest.fixture(scope="package")
def live() -> Iterator[LiveServer]:
    with LiveServer() as server:
        yield server


@pytest.fixture
def storage(tmp_path: Path) -> StorageSection:
    return StorageSection(folder=str(tmp_path / "kept"))


@pytest.fixture
def server(storage: StorageSection) -> Iterator[LiveServer]:
    with LiveServer(storage=storage) as live:
        yield live


@pytest.fixture
def client(server: LiveServer) -> Iterator[openai.OpenAI]:
    with connect(server) as client:
        yield client
