"""The wheel with kernels that ``make wheel`` builds, in an environment without a C compiler."""

import json
import os
import platform
import re
import shlex
import subprocess
import sys
import sysconfig
import urllib.request
import venv
import zipfile
from pathlib import Path

import pytest
import torch

from engine.kernels.levels import LEVELS, levels_here
from engine.settings.own_kernels import c_compiler

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[1]
MANYLINUX = re.compile(r"callboard-[\d.]+-py3-none-manylinux_2_(\d+)_\w+\.whl")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel for this machine."""
    pytest.importorskip("hatchling", reason="only `make serve` installs hatchling")
    if not c_compiler() or not [one for one in LEVELS if one.machine == platform.machine()]:
        pytest.skip("there is no C compiler for a machine that has kernels")
    folder = tmp_path_factory.mktemp("dist")
    # Every kernel is compiled here for every kind of CPU, and hardly called: no time goes into making it fast.
    quick = tmp_path_factory.mktemp("compiler") / "cc"
    quick.write_text(f'#!/bin/sh\nexec {shlex.join(c_compiler())} "$@" -O0\n')
    quick.chmod(0o755)
    environment = {**os.environ, "HATCH_BUILD_HOOK_ENABLE_CUSTOM": "true", "CC": str(quick)}
    build = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", folder]
    subprocess.run(build, cwd=ROOT, env=environment, check=True)
    (made,) = folder.iterdir()
    return made


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of an environment that has the wheel, and from this one what callboard imports."""
    folder = tmp_path_factory.mktemp("clean")
    venv.create(folder, with_pip=False)
    site = Path(sysconfig.get_path("purelib", vars={"base": str(folder)}))
    (site / "others.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    pip = [sys.executable, "-m", "pip", "--python", folder / "bin" / "python", "--disable-pip-version-check"]
    subprocess.run([*pip, "install", "--quiet", "--no-deps", "--no-index", "--ignore-installed", wheel], check=True)
    return folder / "bin"


def test_the_wheel_has_a_library_for_each_kind_of_cpu_and_a_name_that_pip_takes_here(wheel: Path) -> None:
    named = MANYLINUX.fullmatch(wheel.name)
    assert named is not None
    assert int(named[1]) <= 28, "torch's wheels are for a C library of 2.28"
    with zipfile.ZipFile(wheel) as files:
        built = {name.removeprefix("engine/kernels/built/") for name in files.namelist() if "/built/" in name}
    assert built == {f"{one.name}.so" for one in LEVELS if one.machine == platform.machine()}


def completed(address: str) -> str:
    """A completion of eight tokens."""
    body = json.dumps({"model": "callboard-demo", "prompt": "def f(", "max_tokens": 8, "temperature": 0}).encode()
    request = urllib.request.Request(f"{address}/v1/completions", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as answer:
        return json.load(answer)["choices"][0]["text"]


def test_without_a_compiler_the_wheels_kernel_for_this_cpu_serves(installed: Path, tmp_path: Path) -> None:
    demo = installed.parent / "share" / "callboard" / "demo.toml"
    command = [installed / "callboard", "serve", demo, "--port", "0", "--set", "plugins.linear=panels"]
    environment = {"PATH": str(installed), "HOME": str(tmp_path), "PYTHONUNBUFFERED": "1"}
    log = tmp_path / "log"
    with (
        log.open("w") as written,
        subprocess.Popen(
            command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=written, text=True
        ) as process,
    ):
        try:
            assert process.stdout is not None
            said = next((line for line in process.stdout if " is ready after " in line), "")
            address = re.search(r"http://127\.0\.0\.1:\d+", said)
            assert address, log.read_text()
            assert completed(address[0])
        finally:
            process.terminate()
    level = levels_here(torch.backends.cpu.get_cpu_capability())[0]
    assert f"kernels: for {level.name}, of the wheel" in log.read_text()
    assert "compiling" not in log.read_text()
