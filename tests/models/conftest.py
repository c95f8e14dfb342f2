"""Reference models and their checkpoints, made once per run: they are only read."""

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel
from transformers.utils import logging

from engine.checkpoints.checkpoint import ModelSpec
from engine.layers.comm import Comm
from engine.layers.packing import Linears
from engine.models.decoder import Decoder
from engine.models.loader import load_model
from engine.plugins.comm.local import LocalComm
from engine.plugins.families import read_model
from engine.plugins.linear.onednn import onednn_linears
from engine.settings.sections import ModelSection
from tests.models.checkpoints import build, save

SHORT = ModelSection(max_model_len=256)  # with longrope, as far as the reference has the short factors


@dataclass
class Case:
    """A reference model, its checkpoint, and our model loaded from it."""

    reference: PreTrainedModel
    directory: Path
    spec: ModelSpec
    model: Decoder


class Cases:
    """Makes each variant on first use."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.made: dict[str, Case] = {}

    def __getitem__(self, variant: str) -> Case:
        if variant not in self.made:
            reference = build(variant)
            # Every other variant in shards, so that both layouts meet every family.
            directory = save(reference, self.root / variant, sharded=len(self.made) % 2 == 1)
            spec = read_model(directory, model=SHORT)
            self.made[variant] = Case(reference, directory, spec, load(spec))
        return self.made[variant]


def load(
    spec: ModelSpec, dtype: torch.dtype = torch.float32, comm: Comm | None = None, linears: Linears | None = None
) -> Decoder:
    """The model, whole unless there are other ranks."""
    return load_model(
        spec,
        comm or LocalComm(),
        torch.device("cpu"),
        dtype,
        "safetensors",
        0,
        linears=linears or onednn_linears(dtype),
        progress=False,
    )


@pytest.fixture(scope="session")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Cases:
    """Variant name to Case."""
    logging.disable_progress_bar()
    return Cases(tmp_path_factory.mktemp("checkpoints"))
