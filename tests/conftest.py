"""The setting of every test: repeatable hypothesis runs that do not time themselves, uvloop, and no network."""

import gc
import os
from asyncio import AbstractEventLoop
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, settings

from tests.closing_loop import ClosingLoop

pytest_plugins = ["tests.costs", "tests.figures", "tests.network"]

# Before transformers is imported anywhere: a test must not wait for a hub.
os.environ["HF_HUB_OFFLINE"] = "1"
# Before torch is: on tiny models a second thread only waits for the first, for whole time slices on a busy machine.
os.environ.setdefault("OMP_NUM_THREADS", "1")

settings.register_profile(
    "tests",
    derandomize=True,
    deadline=None,
    # How long an example takes says something about the machine, not about the code.
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.load_profile("tests")


def pytest_asyncio_loop_factories() -> dict[str, Callable[[], AbstractEventLoop]]:
    """The loop of every ``async def`` test and fixture: the one that engines and servers run on."""
    return {"uvloop": ClosingLoop}


@pytest.fixture(scope="module", autouse=True)
def old_objects_rest() -> None:
    """The million objects that imports and collecting have left live as long as the process, and are not searched for
    garbage.  Some tests thaw it, so this is seen to before each file."""
    if not gc.get_freeze_count():
        gc.collect()
        gc.freeze()
