"""What pyproject.toml offers to install, and the commands that messages and pages tell people to type."""

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
EXTRAS: dict[str, list[str]] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
TOLD = [
    path
    for pattern in (
        "*.md",
        "Makefile",
        "docs/*.md",
        "deploy/*",
        "callboard/**/*.py",
        "engine/**/*.py",
        "server/**/*.py",
        "examples/**/*.md",
    )
    for path in ROOT.glob(pattern)
]
COMMAND = re.compile(r"pip install (?P<options>(?:-[^\n;]*? )?)['\"]?(?:callboard|\.)\[(?P<extras>[^]]+)\]")
# Its build imports the torch that it is built against, which no environment of pip's own has.
BUILT_HERE = "flash-attn"


def commands() -> list[tuple[str, str, list[str]]]:
    """(file, options, extras) of every command that installs some of them."""
    return [
        (path.name, found["options"], found["extras"].split(","))
        for path in TOLD
        for found in COMMAND.finditer(path.read_text())
    ]


def test_every_command_names_extras_that_there_are() -> None:
    assert {extra for _, _, extras in commands() for extra in extras} >= {"cuda", "otel", "ray", BUILT_HERE}
    for name, _, extras in commands():
        assert set(extras) <= set(EXTRAS), name


def test_what_is_built_against_torch_is_asked_for_with_the_torch_that_is_there() -> None:
    for name, options, extras in commands():
        assert ("--no-build-isolation" in options) == (BUILT_HERE in extras), name


@pytest.mark.parametrize("extra", EXTRAS)
def test_no_other_extra_needs_a_build_against_torch(extra: str) -> None:
    names = {re.split(r"[^\w-]", requirement)[0] for requirement in EXTRAS[extra]}
    assert (BUILT_HERE in names) == (extra == BUILT_HERE)


def test_a_gpu_gets_the_kernels_that_have_wheels() -> None:
    names = {re.split(r"[^\w-]", requirement)[0] for requirement in EXTRAS["cuda"]}
    assert names == {"flashinfer-python", "triton"}
