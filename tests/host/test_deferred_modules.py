"""Modules that wait are there when something needs them, and torch does not miss them before."""

import subprocess
import sys

import pytest

from engine.host.deferred_modules import DEFERRED, NEEDED_BY

BEGIN = """
import sys
from engine.host.deferred_modules import DEFERRED, DeferredModules
DeferredModules().begin()
import torch
pooled = lambda: torch.nn.functional.embedding_bag(
    *(torch.empty(size, dtype=dtype, device="meta") for size, dtype in
      [((3,), torch.int64), ((4, 8), torch.float32), ((1,), torch.int64)]))
"""


def run(program):
    done = subprocess.run([sys.executable, "-c", BEGIN + program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_torch_computes_without_the_modules_and_has_them_once_a_compiler_comes():
    printed = run("""
print([name for name in DEFERRED if vars(sys.modules[name]).get("torch")], "torch._refs" in sys.modules)
print((torch.ones(2, 3) @ torch.ones(3, 2)).sum().item())
try:
    pooled()
except NotImplementedError:
    print("waits")
import torch._dynamo
print(pooled().shape, hasattr(torch._meta_registrations, "activate_meta"))
print(torch.compile(lambda x: x * 2, backend="eager")(torch.ones(2)).tolist())
""")
    assert printed.splitlines() == ["[] False", "12.0", "waits", "torch.Size([1, 8]) True", "[2.0, 2.0]"]


@pytest.mark.slow
def test_a_module_that_needs_them_has_them_before_it_is_imported():
    for name in NEEDED_BY:
        program = f"import {name}; print(pooled().shape)"
        assert run(program) == "torch.Size([1, 8])\n", name


@pytest.mark.slow
def test_a_process_that_has_torch_already_keeps_it_whole():
    program = "import torch\n" + BEGIN + "print(pooled().shape, len(DEFERRED))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == f"torch.Size([1, 8]) {len(DEFERRED)}\n"
