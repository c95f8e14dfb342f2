"""The demo model behind the API, for client libraries that bring their own ideas of it."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.server.engine_server import EngineServer

# What several of them are asked for: an object with one field of two values, which any model can be held to.
CITIES = ("Paris", "Oslo")
TRIP_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"enum": list(CITIES)}},
    "required": ["city"],
    "additionalProperties": False,
}


@pytest.fixture(scope="package")
def root() -> Iterator[str]:
    with EngineServer(model={"name": "demo"}) as server:
        yield server.url


@pytest.fixture(scope="package")
def url(root: str) -> str:
    return f"{root}/v1"
