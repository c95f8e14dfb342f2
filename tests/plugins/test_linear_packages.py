"""Linear kernels of the packages in examples/: right where their wheels are installed, refused where they are not."""

import importlib
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from callboard import LLM, SamplingParams
from callboard.plugins.testing import check_linear, read_declaration
from engine.execution.device import instruction_sets
from engine.types.errors import PluginError
from tests.plugins.conftest import Install

EXAMPLES = Path(__file__).parents[2] / "examples"
# Package -> (module with the hook, module that its wheel installs, the wheel, a quantization that is its own).
PACKAGES = {
    "ggml": ("callboard_ggml.blocks", "xllamacpp", "xllamacpp", "q8_0"),
    "ark": ("callboard_ark.weights", "auto_round_kernel", "auto-round-lib", "int4"),
}


@pytest.fixture(params=PACKAGES)
def package(request: pytest.FixtureRequest, install: Install) -> str:
    """Installed without its wheel, which is there or is not."""
    name: str = request.param
    module = PACKAGES[name][0]
    folder = EXAMPLES / f"linear_{name}" / module.partition(".")[0]
    sources = {f"{folder.name}/{path.name}": path.read_text() for path in folder.glob("*.py")}
    install(f"callboard-{name}", {f"linear.{name}": module}, sources)
    return name


def needs_wheel(name: str) -> None:
    _, imported, wheel, _ = PACKAGES[name]
    if find_spec(imported) is None:
        pytest.skip(f"pip install {wheel}")
    if "avx2" not in instruction_sets():
        pytest.skip("needs AVX2")


def test_it_is_right(package: str) -> None:
    needs_wheel(package)
    module = PACKAGES[package][0]
    declares = read_declaration(module)
    assert declares is not None
    check_linear(importlib.import_module(module).callboard_linear, declares)


def served_by(package: str) -> LLM:
    quantization = PACKAGES[package][3]
    return LLM(
        progress=False,
        config={
            "model": {"quantization": quantization, "dtype": "float32"},
            "plugins": {"linear": package},
            "kv": {"num_pages": 64},
            "device": {"kind": "cpu"},
        },
    )


def test_it_serves(package: str) -> None:
    needs_wheel(package)
    greedy = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    with served_by(package) as llm:
        assert len(llm.generate(["def add(a, b):\n"], greedy)[0].token_ids) == 4


def test_without_its_wheel_the_start_ends_with_what_to_do(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _, imported, _, _ = PACKAGES[package]
    if "avx2" not in instruction_sets():
        pytest.skip("needs AVX2, which the start asks for before the wheel")
    monkeypatch.setitem(sys.modules, imported, None)
    for name in [one for one in sys.modules if one.startswith(f"callboard_{package}")]:
        monkeypatch.delitem(sys.modules, name)  # with the library that it has loaded
    with pytest.raises(PluginError, match=rf"linear\.{package}: .*{imported}"):
        served_by(package)
