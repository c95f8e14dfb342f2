"""Every folder of server/extensions can be deleted: what is left imports, serves a chat request and prints its help.

The fast part deletes three folders in turn, chosen by the list of the repository's files, and answers by a fake engine;
the slow part deletes the others too, and those three with answers by the demo model.
"""

import ast
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import urllib.request
from functools import cache
from pathlib import Path

import pytest

from server.run.folders import PACKAGE

ROOT = Path(__file__).parents[1]
EXTENSIONS = ROOT / "server" / "extensions"
NAMES = sorted(path.parent.name for path in EXTENSIONS.glob("*/__init__.py"))
CODE = [path for folder in ("callboard", "engine", "server") for path in sorted((ROOT / folder).rglob("*.py"))]
NUM_IN_TURN = 3
MOST_FILES = 3  # outside a folder that may name what is in it

# Imports everything that is left, but what is left out for want of the folder that was deleted.
IMPORT_ALL = """
import importlib, pkgutil, sys
import server
from server.run.folders import PACKAGE, folders

present = set(folders())
for module in pkgutil.walk_packages(server.__path__, "server."):
    parts = module.name.split(".")
    if parts[:2] != PACKAGE.split(".") or len(parts) < 3 or parts[2] in present:
        importlib.import_module(module.name)
print(*sorted(present))
"""
SERVE = """
import sys
from server.cli import main
from tests.server.http_client import ask
from tests.server.live_server import MODEL, LiveServer

with LiveServer() as live:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}]}
    reply = ask(live.port, "POST", "/v1/chat/completions", body)
    assert reply.status == 200, reply
    assert ask(live.port, "GET", "/openapi.json").status == 200
    assert ask(live.port, "GET", "/metrics").status == 200
assert "torch" not in sys.modules
try:
    main(["--help"])
except SystemExit as ended:
    assert ended.code == 0
"""

ADDED = """
from server.run.core import all_parts
from server.run.extension import declared
from engine.settings.sections import ServerSection
from tests.server.http_client import ask
from tests.server.live_server import MODEL, LiveServer

with LiveServer(server=ServerSection(api_key="k" * 32)) as live:
    key, body = {"Authorization": "Bearer " + "k" * 32}, {"model": MODEL, "text": "again", "max_tokens": 4}
    assert ask(live.port, "POST", "/v1/echo", body).status == 401
    assert ask(live.port, "POST", "/v1/echo", body, key).json["text"].startswith("again")
    streamed = ask(live.port, "POST", "/v1/echo", {**body, "stream": True}, key)
    assert streamed.body.startswith(b'data: {"text":"again'), streamed.body
    assert "/v1/echo" in ask(live.port, "GET", "/openapi.json", headers=key).json["paths"]
(echo,) = (one for one in declared(all_parts()) if one.path == "/v1/echo")
assert echo.generates
"""


def needs(name: str) -> set[str]:
    """The folders that one declares to import."""
    found = re.search(r"^NEEDS = (\(.*\))$", (EXTENSIONS / name / "__init__.py").read_text(), re.MULTILINE)
    return set(ast.literal_eval(found[1])) if found else set()


def dependents(name: str) -> set[str]:
    """A folder, and those that need it."""
    found = {name}
    while more := {one for one in NAMES if needs(one) & found} - found:
        found |= more
    return found


@cache
def imported_by(path: Path) -> frozenset[str]:
    """The extensions that a file imports by name."""
    if PACKAGE not in (text := path.read_text()):
        return frozenset()
    modules: set[str] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom):
            modules |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
    return frozenset(module.split(".")[2] for module in modules if module.startswith(f"{PACKAGE}."))


def in_turn() -> list[str]:
    """Three folders: others when a file of the repository comes or goes."""
    files = "\n".join(str(path.relative_to(ROOT)) for path in CODE)
    first = int.from_bytes(hashlib.sha256(files.encode()).digest()[:4]) % len(NAMES)
    return sorted((NAMES * 2)[first : first + NUM_IN_TURN])


def tree_without(name: str, folder: Path) -> dict[str, str]:
    """Make a tree without an extension; returns the environment of processes that run it."""
    for linked in ("examples", "tests"):
        (folder / linked).symlink_to(ROOT / linked)
    for copied in ("callboard", "engine", "server"):
        shutil.copytree(
            ROOT / copied,
            folder / copied,
            ignore=lambda path, names: {name} if Path(path) == EXTENSIONS else set(),
        )  # with what Python compiled, which it would do again in each process
    return {**os.environ, "PYTHONPATH": str(folder)}


def run(code: str, folder: Path, environment: dict[str, str]) -> str:
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return result.stdout


def test_there_are_extensions_and_each_says_what_it_is() -> None:
    assert len(NAMES) >= NUM_IN_TURN
    for name in NAMES:
        said = (EXTENSIONS / name / "README.md").read_text()
        assert all(f"- {what}:" in said for what in ("Switched on", "Needs", "Deleting the folder removes")), name
        named = re.findall(r"`(tests/[\w/.]+)`", said) + [
            f"docs/{page}" for page in re.findall(r"docs/(\w+\.md)", said)
        ]
        assert named, name
        assert [path for path in named if not (ROOT / path).exists()] == [], name


@pytest.mark.parametrize("name", NAMES)
def test_nothing_imports_an_extension_but_those_that_declare_it(name: str) -> None:
    importers = {path for path in CODE if EXTENSIONS / name not in path.parents and name in imported_by(path)}
    outside = {path for path in importers if EXTENSIONS not in path.parents}
    assert outside == set()
    assert {path.relative_to(EXTENSIONS).parts[0] for path in importers} <= {one for one in NAMES if name in needs(one)}


@pytest.mark.parametrize("name", NAMES)
def test_what_an_extension_declares_to_need_it_imports(name: str) -> None:
    imported = {one for path in (EXTENSIONS / name).rglob("*.py") for one in imported_by(path)}
    assert imported - {name} == needs(name)


@pytest.mark.parametrize("name", NAMES)
def test_few_files_outside_name_an_extension(name: str) -> None:
    named = re.compile(rf"\bextensions[./]{name}\b")
    others = {one for one in NAMES if name in needs(one)}
    outside = [
        path
        for path in CODE
        if not any(EXTENSIONS / one in path.parents for one in {name, *others}) and named.search(path.read_text())
    ]
    assert len(outside) <= MOST_FILES, outside


OTHERS = [pytest.param(name, marks=pytest.mark.slow) for name in NAMES if name not in in_turn()]


@pytest.mark.parametrize("name", [*in_turn(), *OTHERS])
def test_without_a_folder_the_server_answers(name: str, tmp_path: Path) -> None:
    environment = tree_without(name, tmp_path)
    present, usage = run(IMPORT_ALL + SERVE, tmp_path, environment).split("\n", 1)
    assert present.split() == sorted(set(NAMES) - dependents(name))
    assert "usage: callboard" in usage


def test_a_folder_that_is_added_is_served_everywhere(tmp_path: Path) -> None:
    environment = tree_without("", tmp_path)
    shutil.copytree(ROOT / "tests" / "extension_template", tmp_path / "server" / "extensions" / "echo")
    run(ADDED, tmp_path, environment)


@pytest.mark.slow
@pytest.mark.parametrize("name", in_turn())
def test_without_a_folder_the_demo_model_answers(name: str, tmp_path: Path) -> None:
    environment = tree_without(name, tmp_path)
    assert run(IMPORT_ALL, tmp_path, environment).split() == sorted(set(NAMES) - dependents(name))
    command = [sys.executable, "-m", "callboard", "serve", "examples/demo.toml", "--port", "0"]
    with subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            said = next(line for line in process.stdout if " is ready after " in line)
            url = re.search(r"http://127\.0\.0\.1:\d+", said)
            assert url, said
            body = {"model": "callboard-demo", "messages": [{"role": "user", "content": "What is a page?"}]}
            request = urllib.request.Request(
                f"{url[0]}/v1/chat/completions",
                json.dumps({**body, "max_tokens": 4}).encode(),
                {"Content-Type": "application/json"},
            )
            with urllib.request.urlopen(request, timeout=60) as response:
                assert json.load(response)["choices"][0]["message"]["content"]
        finally:
            process.send_signal(signal.SIGTERM)
    assert process.returncode == 0
    usage = subprocess.run(
        [sys.executable, "-m", "callboard", "--help"], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert usage.returncode == 0, usage.stderr
