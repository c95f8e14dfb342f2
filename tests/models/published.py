"""Tiny checkpoints in exactly the layout in which a model is published, and their comparison with transformers.

Owns: writing the files, the comparison.  Does not know: models.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from engine.models.model import Model
from engine.plugins.families import read_model
from engine.plugins.testing.steps import Driver
from tests.models.checkpoints import random_tokens
from tests.models.conftest import SHORT, load

PROMPT = random_tokens(33, 6)
NUM_TOKENS = 64
TOLERANCE = 1e-4


def write(directory: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
    """Write a checkpoint of one file."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    save_file({name: one.contiguous() for name, one in tensors.items()}, directory / "model.safetensors")
    return directory


def greedy(model: Model) -> list[int]:
    """64 tokens after the prompt."""
    driver, tokens = Driver(model, page_size=16, num_pages=80), list(PROMPT)
    given = tokens
    for _ in range(NUM_TOKENS):
        given = [int(driver.step({"a": given}, rows="last")["a"].argmax())]
        tokens += given
    return tokens


@torch.no_grad()
def assert_same(directory: Path, reference: PreTrainedModel) -> None:
    """The reference's 64 greedy tokens, and its logits over all of them, in float32."""
    model = load(read_model(directory, model=SHORT))
    tokens = greedy(model)
    expected = reference(input_ids=torch.tensor([tokens])).logits[0].float()
    assert expected.std() > 0.05, "the reference's logits are flat"
    assert tokens[len(PROMPT) :] == expected[len(PROMPT) - 1 : -1].argmax(-1).tolist()
    got = Driver(model, page_size=1, num_pages=120).step({"a": tokens})["a"]
    error = (got - expected).abs().max().item()
    assert error <= TOLERANCE, f"logits are off by {error:.3g}"
