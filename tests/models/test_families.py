"""Every built-in family passes the kit that authors of families use, on a checkpoint of each of its details."""

import importlib
from pathlib import Path

import pytest

from engine.plugins.declaration import read_declaration
from engine.plugins.manager import BUILTIN
from engine.plugins.testing.model import check_model
from tests.models.checkpoints import NOT_PLAIN, build

FAMILIES = {name: module for name, module in BUILTIN.items() if name.startswith("model.")}
# Their CPU form picks experts by value; on GPUs they are refused.
WITH_EXPERTS = ("mixtral", "qwen3-moe", "gpt-oss")
CHECKED = ["llama", "mistral-window", "qwen2-tied-upper-window", "qwen3-yarn-bias", "seed-oss", *NOT_PLAIN]


def family_of(architecture: str) -> str:
    """The module that declares it."""
    (module,) = [one for one in FAMILIES.values() if architecture in read_declaration(one).architectures]
    return module


@pytest.mark.parametrize("variant", CHECKED)
def test_the_reference_and_the_family_agree(variant: str, tmp_path: Path):
    reference = build(variant)
    module = importlib.import_module(family_of(type(reference).__name__))
    check_model(module.callboard_model, reference, tmp_path, captured=variant not in WITH_EXPERTS)


def test_every_family_is_among_them():
    architectures = {type(build(variant)).__name__ for variant in CHECKED}
    assert architectures == {name for one in FAMILIES.values() for name in read_declaration(one).architectures}
