from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where checkpoints are made once."""
    return tmp_path_factory.mktemp("pictures")
