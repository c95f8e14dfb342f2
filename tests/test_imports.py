"""The torch-free half is torch-free when it is imported, not only on paper; and importing has no side effects."""

import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import callboard
import callboard.plugins
import callboard.plugins.testing

TORCH_FREE = [
    "callboard",
    "callboard.plugins",
    "callboard.plugins.testing",
    "engine.config",
    "engine.features.kv_store.records",
    "engine.features.lora.files",
    "engine.features.speculation.fitting",
    "engine.messages",
    "engine.control.system",
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
    "server.run.app",
    "server.cli",
]


def python(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], cwd=cwd, capture_output=True, text=True, check=False)


@pytest.mark.slow
@pytest.mark.parametrize("module", TORCH_FREE)
def test_importing_it_first_does_not_import_torch(module: str) -> None:
    code = f"import sys, {module}; sys.exit('torch was imported' if 'torch' in sys.modules else 0)"
    result = python("-c", code)
    assert result.returncode == 0, result.stderr


def test_importing_them_does_not_import_torch() -> None:
    code = (
        "import importlib, sys\n"
        f"for module in {TORCH_FREE}:\n"
        "    importlib.import_module(module)\n"
        "    if 'torch' in sys.modules: sys.exit(f'{module} imports torch')"
    )
    result = python("-c", code)
    assert result.returncode == 0, result.stderr


def test_importing_the_engine_logs_nothing_and_starts_no_thread() -> None:
    code = (
        "import threading, logging, engine.llm; assert threading.active_count() == 1; assert not logging.root.handlers"
    )
    result = python("-c", code)
    assert (result.returncode, result.stdout) == (0, ""), result.stderr


@pytest.mark.parametrize(
    "page", [callboard, callboard.plugins, callboard.plugins.testing], ids=lambda page: page.__name__
)
def test_what_a_public_page_exports_is_there(page: ModuleType) -> None:
    for name in page.__all__:
        assert getattr(page, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = page.nonsense


def test_the_package_is_the_command_and_knows_its_version() -> None:
    assert python("-m", "callboard", "--version").stdout == f"callboard {callboard.__version__}\n"


@pytest.mark.parametrize("path", ["engine.py", "server.py", "engine/__init__.py"])
def test_a_file_that_shadows_a_package_of_ours_is_named(tmp_path: Path, path: str) -> None:
    (tmp_path / path).parent.mkdir(exist_ok=True)
    (tmp_path / path).write_text("print('not ours')\n")
    (tmp_path / "script.py").write_text("from callboard import LLM\n")
    result = python("script.py", cwd=tmp_path)
    assert (result.returncode, result.stdout) == (1, "")
    assert f"Python finds {tmp_path.resolve() / path} first: rename that" in result.stderr


def test_a_folder_that_is_no_package_shadows_nothing(tmp_path: Path) -> None:
    (tmp_path / "engine").mkdir()
    (tmp_path / "script.py").write_text("from callboard import LLM\n")
    assert python("script.py", cwd=tmp_path).returncode == 0
