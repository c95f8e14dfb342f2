"""Client libraries against a live server: ``python -m tests.clients --folder DIR [--only NAME]``.

Each library goes into a folder of its own below DIR, so that none has to agree with another on what both need, and its
tests run with that folder in front of everything else.  What cannot be installed is skipped, and the table says so.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
INSTALL_S, TEST_S = 600, 600


class Client(NamedTuple):
    """test: its file, here or at the place that is given.  packages: of PyPI; of npm where is_node."""

    name: str
    packages: tuple[str, ...]
    test: str
    is_node: bool = False


CLIENTS = (
    Client("openai", ("openai",), "tests/server/test_openai_client.py"),
    Client("anthropic", ("anthropic",), "test_anthropic_client.py"),
    Client("openai-agents", ("openai-agents",), "test_openai_agents.py"),
    Client("langchain", ("langchain-openai",), "test_langchain.py"),
    Client("llama-index", ("llama-index-llms-openai-like",), "test_llama_index.py"),
    Client("litellm", ("litellm", "mcp"), "test_litellm.py"),
    Client("pydantic-ai", ("pydantic-ai-slim[openai]",), "test_pydantic_ai.py"),
    Client("instructor", ("instructor",), "test_instructor.py"),
    Client("dspy", ("dspy",), "test_dspy.py"),
    Client("ollama", ("ollama",), "test_ollama.py"),
    Client("lm-eval", ("lm-eval[api]",), "test_lm_eval.py"),
    Client("schemathesis", ("schemathesis",), "test_schemathesis.py"),
    Client("openai (node)", ("openai", "zod"), "test_node.py::test_openai", is_node=True),
    Client("Vercel AI SDK", ("ai", "@ai-sdk/openai-compatible", "zod"), "test_node.py::test_ai_sdk", is_node=True),
    Client("anthropic (node)", ("@anthropic-ai/sdk",), "test_node.py::test_anthropic", is_node=True),
)


def install(client: Client, folder: Path) -> str:
    """Returns why it cannot be installed, or nothing."""
    log, whole = folder.with_suffix(".install.log"), folder / "installed"
    if whole.exists():
        return ""
    shutil.rmtree(folder, ignore_errors=True)  # an installation that ended halfway
    folder.mkdir()
    if client.is_node:
        command = ["npm", "install", "--no-audit", "--no-fund", "--prefix", str(folder), *client.packages]
    else:
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-compile"]
        command = [*pip, "--upgrade", "--target", str(folder), *client.packages]
    try:
        with log.open("w") as file:
            code = subprocess.run(command, stdout=file, stderr=file, timeout=INSTALL_S, check=False).returncode
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{command[0]}: {error}"
    if code:
        return f"not installed, see {log}"
    whole.touch()
    return ""


def version(client: Client, folder: Path) -> str:
    """Of the first package."""
    name = client.packages[0].partition("[")[0]
    if client.is_node:
        manifest = folder / "node_modules" / name / "package.json"
        return str(json.loads(manifest.read_text())["version"]) if manifest.exists() else "?"
    found = next(folder.glob(f"{name.replace('-', '_')}-*.dist-info"), None)
    return found.name.split("-")[1].removesuffix(".dist") if found else "?"


def check(client: Client, folder: Path) -> str:
    """Returns what its tests came to, in a few words."""
    test = client.test if "/" in client.test else str(HERE / client.test)
    environment = {**os.environ, "PYTHONPATH": f"{folder}:{ROOT}", "CLIENT_FOLDER": str(folder)}
    log = folder.with_suffix(".test.log")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-o",
        "addopts=",
        "-o",
        "filterwarnings=default",
        "-p",
        "no:cacheprovider",
        "-rs",
        test,
    ]
    with log.open("w") as file:
        try:
            code = subprocess.run(
                command, stdout=file, stderr=file, cwd=ROOT, env=environment, timeout=TEST_S, check=False
            ).returncode
        except subprocess.TimeoutExpired:
            return f"FAILED: not done after {TEST_S} s, see {log}"
    counts = re.findall(r"=+ (.*(?:passed|failed|skipped|error).*) =+", log.read_text())
    said = counts[-1] if counts else "no test ran to its end"
    return said if not code else f"FAILED: {said}, see {log}"


def main() -> int:
    """Returns how many failed."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--folder", type=Path, required=True, help="where libraries are installed, and kept")
    options.add_argument("--only", default="", help="a part of a library's name")
    given = options.parse_args()
    folder = given.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    num_failed = 0
    for client in CLIENTS:
        if given.only not in client.name:
            continue
        start = time.monotonic()
        place = folder / client.name.replace(" ", "-").strip("()")
        trouble = install(client, place)
        said = f"skipped: {trouble}" if trouble else check(client, place)
        num_failed += said.startswith("FAILED")
        of = "" if trouble else version(client, place)
        print(f"{client.name:<18} {of:<10} {time.monotonic() - start:5.0f} s  {said}", flush=True)
    return num_failed


if __name__ == "__main__":
    sys.exit(main())
