"""What the tests of the real model share: its file, transformers' reading of it, engines."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from callboard import LLM
from tests.real import model


@pytest.fixture(scope="session")
def real() -> Path:
    """The model's file; tests that need it are skipped where it is not."""
    if not (path := model.path()).is_file():
        pytest.skip("the real model is not here: make real")
    return path


@pytest.fixture(scope="session")
def reference(real: Path) -> LlamaForCausalLM:
    """transformers' reading of the same file, in float32."""
    pytest.importorskip("gguf", reason="pip install 'callboard[gguf]'")
    return AutoModelForCausalLM.from_pretrained(real.parent, gguf_file=real.name, attn_implementation="eager").eval()


@pytest.fixture(scope="session")
def engine(real: Path) -> Iterator[Callable[..., LLM]]:
    """Return engines by the settings that they have beside small ones; each is built once."""
    built: dict[str, LLM] = {}
    with ExitStack() as stack:

        def build(**sections: dict[str, Any]) -> LLM:
            key = repr(sections)
            if key not in built:
                small = {"model": {"max_model_len": 1024}, "kv": {"num_pages": 256}, "device": {"kind": "cpu"}}
                config = {name: small.get(name, {}) | sections.get(name, {}) for name in {*small, *sections}}
                built[key] = stack.enter_context(LLM(str(real), progress=False, config=config))
            return built[key]

        yield build
