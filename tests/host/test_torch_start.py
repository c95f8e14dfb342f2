"""A start imports less of torch, and what needs the rest of it has it."""

import subprocess
import sys
from pathlib import Path

import pytest

from engine.host.device_defaults import torch_may_use_gpus

DEMO = Path(__file__).parents[2] / "examples" / "demo_model"
LEFT_OUT = ("torch._decomp", "torch._refs", "torch._dynamo", "torch.export._trace", "transformers", "rich.table")

pytestmark = pytest.mark.skipif(torch_may_use_gpus(), reason="torch is built for GPUs: all of it is imported")


def run(code: str) -> str:
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_a_model_that_answers_has_not_imported_what_compilers_and_exports_use() -> None:
    code = f"""
import sys
from engine.host.torch_start import start_torch
start_torch()
from callboard import LLM, SamplingParams
with LLM({str(DEMO)!r}, progress=False) as llm:
    (answer,) = llm.generate([[5, 6, 7]], SamplingParams(temperature=0.0, max_tokens=3), progress=False)
assert len(answer.token_ids) == 3
print(*(one for one in {LEFT_OUT!r} if one in sys.modules))
"""
    assert run(code).split() == []


@pytest.mark.parametrize(
    "use",
    [
        "torch.export.export(torch.nn.Linear(4, 4), (torch.ones(2, 4),))",
        "import torch._dynamo",
        pytest.param("torch.compile(torch.sin, backend='eager')(torch.ones(2))", marks=pytest.mark.slow),
        pytest.param("import transformers", marks=pytest.mark.slow),
    ],
)
def test_the_rest_is_there_for_what_needs_it(use: str) -> None:
    code = f"""
import sys
from engine.host.torch_start import start_torch
start_torch()
import torch
assert "torch._decomp" not in sys.modules
{use}
assert "torch._decomp" in sys.modules
q = torch.empty(1, 2, 3, 4, device="meta")
assert torch.nn.functional.scaled_dot_product_attention(q, q, q).shape == q.shape
"""
    run(code)


def test_it_does_nothing_where_torch_is_imported_already() -> None:
    code = """
import sys, torch
from engine.host.torch_start import start_torch
finders = list(sys.meta_path)
start_torch()
assert finders == sys.meta_path
assert "torch._decomp" in sys.modules
"""
    run(code)
