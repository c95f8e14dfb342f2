"""A server of the demo model with a folder of weights, and a socket for more."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.config import Config, build_config
from tests.extensions.weight_updates.trainer import DEMO
from tests.server.live_system import MODEL, LiveSystem


@pytest.fixture(scope="module")
def storage(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A storage folder with the demo model, changed a little, as weights/step-1."""
    folder = tmp_path_factory.mktemp("storage")
    step = folder / "weights" / "step-1"
    step.mkdir(parents=True)
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(DEMO / name, step)
    generator = torch.Generator().manual_seed(1)
    tensors = {
        name: (one.float() + 0.3 * one.float().std() * torch.randn(one.shape, generator=generator)).to(one.dtype)
        for name, one in load_file(DEMO / "model.safetensors").items()
    }
    save_file(tensors, step / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def live(storage: Path) -> Iterator[LiveSystem]:
    settings: dict[str, Any] = {
        "model": {"path": str(DEMO), "name": MODEL},
        "kv": {"num_pages": 256},
        "device": {"threads": 1},
        "storage": {"folder": str(storage)},
        "server": {"weights_socket": str(storage / "weights.sock")},
    }
    with LiveSystem(build_config(Config(), settings)) as live:
        yield live
