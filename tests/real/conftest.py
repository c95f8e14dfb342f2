"""Fixtures of the real model: its file, transformers' reading of it, engines."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

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
    """Return transformers' reading of the same file, in float32."""
    pytest.importorskip("gguf", reason="pip install 'callboard[gguf]'")
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    config = LlamaConfig(**load_gguf_checkpoint(str(real))["config"], attn_implementation="eager")
    read = LlamaForCausalLM(config).eval()
    tensors = load_gguf_checkpoint(str(real), return_tensors=True, model_to_load=read)["tensors"]
    missing, unexpected = read.load_state_dict(tensors, strict=False)
    assert set(missing) <= {"lm_head.weight"}  # tied
    assert not unexpected
    read.tie_weights()
    return read


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
