"""The demo model behind the API, for client libraries that bring their own ideas of it."""

from collections.abc import Iterator

import pytest

from tests.server.engine_server import EngineServer


@pytest.fixture(scope="package")
def url() -> Iterator[str]:
    with EngineServer(model={"name": "demo"}) as server:
        yield f"{server.url}/v1"
