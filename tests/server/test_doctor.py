"""What the doctor finds, and that it says what to do about it."""

import json
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from engine.checkpoints.checkpoint import resolve_checkpoint
from engine.config import Config, build_config
from engine.settings import own_kernels
from engine.startup import inventory, preview
from engine.startup.inventory import GPU, Inventory
from engine.types.errors import WeightsError
from server.cli import main
from server.extensions.doctor import doctor
from server.extensions.doctor.doctor import Finding, examine
from server.extensions.traces import extension
from tests.models.checkpoints import build
from tests.own_cache import use_own_cache

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "examples" / "demo_model"


def findings(**tables: dict[str, Any]) -> dict[str, Finding]:
    tables = {"model": {"path": "demo"}, "server": {"port": 0}, **tables}
    return {one.what: one for one in examine(build_config(Config(), tables))}


def test_a_machine_that_can_serve_the_demo_model_has_nothing_bad() -> None:
    found = findings()
    assert not [one for one in found.values() if one.verdict == "bad"]
    assert {"Python", "packages", "HTTP parser", "torch", "attention", "cores", "memory", "port", "model"} <= set(found)
    assert "msgspec" in found["packages"].found
    assert found["API key"].verdict == "note"
    assert all(one.advice for one in found.values() if one.verdict != "good")


def test_a_port_that_is_taken_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        one = findings(server={"port": port})["port"]
    assert (one.verdict, str(port) in one.advice) == ("bad", True)


def test_what_a_checkpoint_lacks_is_named(tmp_path: Path) -> None:
    assert findings(model={"path": str(tmp_path)})["model"].verdict == "bad"
    shutil.copy(DEMO / "config.json", tmp_path)
    found = findings(model={"path": str(tmp_path)})
    assert (found["weights"].verdict, found["tokenizer"].verdict) == ("bad", "bad")
    dummy = findings(model={"path": str(tmp_path), "load_format": "dummy", "tokenizer": "none"})
    assert (dummy["weights"].verdict, "tokenizer" in dummy) == ("note", False)
    shutil.copytree(DEMO, tmp_path / "copy")
    for name in ("chat_template.jinja", "tokenizer_config.json"):
        (tmp_path / "copy" / name).unlink(missing_ok=True)
    assert findings(model={"path": str(tmp_path / "copy")})["chat template"].verdict == "note"


def test_a_model_that_would_be_downloaded_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "resolve_checkpoint", lambda *_: pytest.fail("looked on the hub"))
    assert findings(model={"path": "some/model"})["model"].verdict == "note"


@pytest.mark.parametrize("path", ["nope", "./some/model", "some/model.gguf", "a/b/c", ""])
def test_a_path_that_leads_nowhere_is_refused_with_the_words_of_a_start(path: str) -> None:
    one = findings(model={"path": path})["model"]
    with pytest.raises(WeightsError) as refused:
        resolve_checkpoint(path, "")
    assert (one.verdict, one.advice) == ("bad", str(refused.value))


@pytest.mark.slow
def test_a_gguf_file_is_looked_at_as_a_start_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("gguf", reason="pip install 'callboard[gguf]'")
    from tests.formats.test_gguf import write

    use_own_cache(monkeypatch, tmp_path / "cache")
    path = tmp_path / "tiny.gguf"
    write(path, build("llama"), tokenizer=True)
    found = findings(model={"path": str(path)}, device={"kind": "cpu"})
    assert [found[what].verdict for what in ("model", "weights")] == ["good", "good"]
    assert found["model"].found.startswith(f"{path}: ")
    assert "while they load" in found["weights"].found
    assert "tokenizer" not in found
    monkeypatch.setattr(preview, "free_bytes", lambda device: 1)
    assert findings(model={"path": str(path)}, device={"kind": "cpu"})["weights"].verdict == "bad"
    path.write_bytes(path.read_bytes()[:64])
    assert findings(model={"path": str(path)})["model"].verdict == "bad"


@pytest.mark.parametrize("load_format", ["safetensors", "dummy"])
def test_weights_that_do_not_fit_the_memory_are_named_with_the_numbers_of_a_start(
    monkeypatch: pytest.MonkeyPatch, load_format: str
) -> None:
    monkeypatch.setattr(preview, "free_bytes", lambda device: 1 << 20)
    one = findings(model={"path": "demo", "load_format": load_format}, device={"kind": "cpu"})["weights"]
    assert one.verdict == "bad"
    assert "its weights need 0.02 GB in float32, 0.00 GB are available" in one.advice


def test_ranks_on_a_cpu_share_what_there_is_as_they_do_at_a_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preview, "free_bytes", lambda device: 10_000_000_000)
    one, two = (
        findings(model={"path": "demo"}, device={"kind": "cpu", "tensor_parallel": ranks})["weights"].found
        for ranks in (1, 2)
    )
    assert "of 10.00 GB" in one
    assert "0.01 GB at most while they load, of 5.00 GB" in two


def test_memory_is_what_the_container_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "available_bytes", lambda: 1_500_000_000)
    assert "1.50 GB" in findings()["memory"].found


@pytest.mark.parametrize(
    "driver, cuda, kind, verdict, said",
    [
        (False, None, "auto", "note", "no GPU driver"),
        (True, None, "auto", "note", "CPU only"),
        (True, "13.0", "auto", "note", "cannot reach"),
        (True, None, "cuda", "bad", "CPU only"),
    ],
)
def test_a_gpu_that_is_not_to_be_had_is_explained(
    monkeypatch: pytest.MonkeyPatch, driver: bool, cuda: str | None, kind: str, verdict: str, said: str
) -> None:
    monkeypatch.setattr(inventory, "take_inventory", lambda: Inventory("2.0", cuda, 2, ()))
    monkeypatch.setattr(shutil, "which", lambda name: "/usr/bin/nvidia-smi" if driver else None)
    one = findings(device={"kind": kind})["GPU"]
    assert (one.verdict, said in one.found) == (verdict, True)


def test_a_gpu_that_somebody_else_fills_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = (GPU("H200", "9.0", 140 << 30, 141 << 30), GPU("H200", "9.0", 3 << 30, 141 << 30))
    monkeypatch.setattr(inventory, "take_inventory", lambda: Inventory("2.0", "13.0", 2, gpus))
    found = findings()
    assert (found["GPU 0"].verdict, found["GPU 1"].verdict) == ("good", "note")
    assert "nvidia-smi" in found["GPU 1"].advice


def test_a_gpu_without_what_its_kernels_need_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = (GPU("H100", "9.0", 79 << 30, 80 << 30),)
    monkeypatch.setattr(inventory, "take_inventory", lambda: Inventory("2.0", "13.0", 2, gpus))
    monkeypatch.setattr(own_kernels.sysconfig, "get_path", lambda name: "/no/headers")
    monkeypatch.setattr(own_kernels, "find_spec", lambda name: name == "triton")
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    found = findings()["kernels"]
    assert (found.verdict, "10 to 30 times slower" in found.found) == ("note", True)
    assert "apt-get install python3-dev" in found.advice


def test_too_few_files_for_the_connections_are_noted() -> None:
    one = findings(server={"port": 0, "max_connections": 10_000_000})["open files"]
    assert one.verdict in ("note", "bad")
    assert "ulimit" in one.advice


def test_traces_without_their_package_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extension, "is_installed", lambda: False)
    one = findings(server={"port": 0, "traces": "http://127.0.0.1:4318/v1/traces"})["traces"]
    assert (one.verdict, "callboard[otel]" in one.advice) == ("bad", True)


def test_folders_that_a_start_would_refuse_are_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        found = findings(storage={"folder": str(folder)})["storage"]
        assert (found.verdict, str(tmp_path / "file") in found.found) == ("bad", True)
    assert findings(storage={"journal_streams": True})["storage"].verdict == "bad"
    assert findings(storage={"folder": str(tmp_path / "new" / "one")})["storage"].verdict == "good"
    assert not (tmp_path / "new").exists()
    assert findings(lora={"folder": str(tmp_path / "none")})["adapters"].verdict == "bad"
    assert findings(lora={"folder": str(tmp_path)})["adapters"].verdict == "good"


def test_the_command_prints_its_findings_and_its_exit_code_says_that_a_start_would_fail(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "server.cli", "doctor", "--set", "server.port=0"]
    command += ["--set", f"model.path={json.dumps(str(tmp_path))}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (2, "")
    assert " bad  model" in done.stdout
    assert "good  Python" in done.stdout


def test_a_machine_on_which_all_is_well_gives_no_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    main(["doctor", "--set", "server.port=0", "--log-level", "error"])
    assert "good  model" in capsys.readouterr().out
