"""A directory for sockets that no other test's engines share, so that what is left in it was left by this one."""

import shutil
import tempfile
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="module")
def _own_runtime_directory() -> Iterator[None]:
    directory = tempfile.mkdtemp(prefix="cb-")  # short: a socket's address has 107 bytes
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_RUNTIME_DIR", directory)
        yield
    shutil.rmtree(directory, ignore_errors=True)
