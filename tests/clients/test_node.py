"""Clients of Node.js: each runs a program of ``programs/``, which ends with an error if anything is not as it should.

``make conformance`` installs them, into the folder that ``CLIENT_FOLDER`` names."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

PROGRAMS = Path(__file__).parent / "programs"
FOLDER = Path(os.environ.get("CLIENT_FOLDER", "/nowhere"))


def run(name: str, package: str, url: str) -> None:
    if shutil.which("node") is None or not (FOLDER / "node_modules" / package).is_dir():
        pytest.skip(f"node or {package} is not installed: make conformance")
    # A program finds the packages that lie beside it.
    program = shutil.copy(PROGRAMS / name, FOLDER / name)
    environment = {**os.environ, "BASE_URL": url}
    ran = subprocess.run(["node", program], env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_openai(url: str) -> None:
    run("openai_node.mjs", "openai", url)


def test_ai_sdk(url: str) -> None:
    run("ai_sdk.mjs", "ai", url)


def test_anthropic(root: str) -> None:
    run("anthropic_node.mjs", "@anthropic-ai/sdk", root)
