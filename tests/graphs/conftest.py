"""The models that are captured, and the collector as it was."""

import gc
from collections.abc import Iterator

import pytest

from tests.models.conftest import cases

__all__ = ["cases"]


@pytest.fixture(autouse=True)
def collector() -> Iterator[None]:
    """Every capture collects garbage: here only what the test itself makes, since torch and all that tests import are
    half a second's walk.  Ranks that capture in threads of one process leave the collector in any state; in service
    each has a process of its own."""
    gc.freeze()
    yield
    gc.unfreeze()
    gc.enable()
