"""The models that are captured, and the collector as it was."""

import gc
from collections.abc import Iterator

import pytest

from tests.models.conftest import cases

__all__ = ["cases"]


@pytest.fixture(autouse=True)
def collector() -> Iterator[None]:
    """Ranks that capture in threads of one process leave it in any state; in service each has a process of its own."""
    yield
    gc.unfreeze()
    gc.enable()
