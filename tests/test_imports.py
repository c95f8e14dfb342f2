"""The torch-free half is torch-free when it is imported, not only on paper; and importing has no side effects."""

import subprocess
import sys

import pytest

import engine

TORCH_FREE = [
    "engine",
    "engine.config",
    "engine.messages",
    "engine.system",
    "engine.scheduling.planner",
    "engine.kv.pages",
    "engine.checkpoints.checkpoint",
    "engine.workers.link",
    "engine.workers.executor_main",
    "engine.workers.cluster.node",
    "engine.workers.placement",
    "engine.workers.tokenizer_main",
    "engine.plugins.comm.local",
    "engine.plugins.listing",
    "engine.plugins.manager",
    "engine.plugins.observer.log",
    "engine.plugins.observers",
    "engine.plugins.policy.lpm",
    "engine.plugins.selection",
    "engine.plugins.testing.eviction",
    "engine.plugins.testing.policy",
    "engine.text.codec",
    "server.app",
    "server.cli",
]


@pytest.mark.parametrize("module", TORCH_FREE)
def test_importing_it_does_not_import_torch(module: str) -> None:
    code = f"import sys, {module}; sys.exit('torch was imported' if 'torch' in sys.modules else 0)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def test_importing_the_engine_logs_nothing_and_starts_no_thread() -> None:
    code = (
        "import threading, logging, engine.llm; assert threading.active_count() == 1; assert not logging.root.handlers"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout) == (0, ""), result.stderr


def test_what_the_package_exports_is_there() -> None:
    for name in engine.__all__:
        assert getattr(engine, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = engine.nonsense
