"""A folder of engine/features can be deleted: the rest imports and generates the same tokens."""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FEATURES = ROOT / "engine" / "features"
NAMES = sorted(path.parent.name for path in FEATURES.glob("*/__init__.py"))
CHAOS = "server/extensions/chaos"  # simulates the features that it names
# The folders that go with a feature: extensions of the server for its users, and features that build on it.
EXTENSIONS = {
    "explain": ("server/extensions/explain",),
    "handover": ("server/extensions/handover", CHAOS),
    "host_tier": (CHAOS,),
    "itl_target": (CHAOS,),
    "kv_store": (CHAOS,),
    "late_masks": (CHAOS,),
    "lora": ("server/extensions/adapters", CHAOS),
    "pooling": ("server/extensions/pooling", "server/extensions/ollama", "engine/features/token_embed"),
    "quarantine": (CHAOS,),
    "recording": ("server/extensions/recording", CHAOS),
    "sessions": ("server/extensions/sessions",),
    "shared_prefix": (CHAOS,),
    "speculation": (CHAOS,),
    "states": (CHAOS,),
    "traffic": ("server/extensions/whatif",),
    "weight_updates": ("server/extensions/weight_updates",),
}
# The product's other files that import from a feature.
IMPORTERS = {"pooling": {"engine/llm.py"}, "weight_updates": {"callboard/weights.py", "engine/llm.py"}}
# What names a feature, and more folders that are its own.
NAMED: dict[str, tuple[str, tuple[str, ...]]] = {
    "explain": (r"features\.explain|/explain\b", ()),
    "grammar": (r"features\.grammar|GrammarCache", ()),
    "host_tier": (r"host_tier|HostTier|host tier", ()),
    "kv_store": (r"kv_store|KVStore", ("engine/plugins/kv_store",)),
    "lora": (r"\blora|LoRA", ()),
    "pooling": (r"[Pp]ooling(?!_kernel_size)", ()),  # that one is a setting of an encoder of pictures
    "quarantine": (r"[Qq]uarantine", ()),
    "recording": (r"flight recorder|recording_|Record(ing|er)[A-Z]|recordings/", ()),
    "speculation": (r"speculat", ("engine/plugins/proposer",)),
    "token_embed": (r"token_embed", ("server/extensions/pooling",)),
    "traffic": (r"trace_mb|features\.traffic|TraceRecorder", ()),
}
MOST_FILES = 3
GENERATE = """
from callboard import LLM, SamplingParams
with LLM("examples/demo_model", progress=False) as llm:
    print(llm.generate(["import os", "def f("], SamplingParams(temperature=0, max_tokens=8)))
"""


# A process imports torch, which takes longer than all else here, and forks for each tree: reads a tree and where its
# output goes, and writes the fork's exit code.
FORKS = f"""
import json, os, sys, traceback
import torch

for line in sys.stdin:
    folder, output = json.loads(line)
    if not (pid := os.fork()):
        os.chdir(folder)
        sys.path.insert(0, folder)
        os.environ["PYTHONPATH"] = folder
        with open(output, "w") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        status = 1
        try:
            exec({GENERATE!r})
            status = 0
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""


class Forks:
    """One process that forks for each tree and returns what the tree generates."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._said: dict[Path, str] = {}
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        self._process = subprocess.Popen(
            [sys.executable, "-c", FORKS],
            cwd=folder,
            env=environment | {"OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def generated(self, tree: Path) -> str:
        """The output of the tree in a folder."""
        if tree not in self._said:
            assert self._process.stdin is not None
            assert self._process.stdout is not None
            output = self._folder / f"{len(self._said)}.txt"
            print(json.dumps([str(tree), str(output)]), file=self._process.stdin, flush=True)
            code = self._process.stdout.readline().strip()
            said = output.read_text()
            assert code == "0", said[-3000:]
            self._said[tree] = re.sub(r"request_id=[^,)]*|[a-z_]+_s=[\d.e-]+", "", said)
        return self._said[tree]

    def close(self) -> None:
        """End the process."""
        self._process.communicate()


@pytest.fixture(scope="module")
def forks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forks]:
    made = Forks(tmp_path_factory.mktemp("forks"))
    yield made
    made.close()


def own_folders(name: str) -> set[Path]:
    """The folders that go with a feature, and its own."""
    return {FEATURES / name, *(ROOT / path for path in EXTENSIONS.get(name, ()))}


def outside(pattern: str, folders: set[Path]) -> set[str]:
    """The product's files that match, outside of these folders."""
    matching = re.compile(pattern, re.MULTILINE)
    return {
        path.relative_to(ROOT).as_posix()
        for folder in ("callboard", "engine", "server")
        for path in (ROOT / folder).rglob("*.py")
        if not folders & set(path.parents) and matching.search(path.read_text())
    }


def check_without(name: str, folder: Path, forks: Forks) -> None:
    """Check that a tree without a feature, and what goes with it, generates the same."""
    (folder / "examples").symlink_to(ROOT / "examples")
    gone = own_folders(name)
    for copied in ("callboard", "engine", "server"):
        shutil.copytree(
            ROOT / copied,
            folder / copied,
            ignore=lambda path, names: {one for one in names if Path(path, one) in gone},
        )  # with what Python compiled, which it would do again
    assert forks.generated(folder) == forks.generated(ROOT)


def in_turn() -> str:
    """A folder: another one when a file of the engine comes or goes."""
    files = "\n".join(sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "engine").rglob("*.py")))
    return NAMES[int.from_bytes(hashlib.sha256(files.encode()).digest()[:4]) % len(NAMES)]


@pytest.mark.parametrize("name", NAMES)
def test_few_files_outside_import_a_feature(name: str) -> None:
    importing = rf"^\s*(?:from|import) engine\.features\.{name}\b"
    assert outside(importing, own_folders(name)) == IMPORTERS.get(name, set())


@pytest.mark.parametrize("name", NAMED)
def test_few_files_outside_name_a_feature(name: str) -> None:
    pattern, folders = NAMED[name]
    found = outside(pattern, own_folders(name) | {ROOT / path for path in folders})
    assert len(found) <= MOST_FILES, found


@pytest.mark.parametrize("name", NAMES)
def test_a_feature_has_a_page_of_its_own(name: str) -> None:
    assert 5 <= len((FEATURES / name / "README.md").read_text().splitlines()) <= 20


def test_without_one_folder_in_turn_the_demo_model_generates_the_same(tmp_path: Path, forks: Forks) -> None:
    check_without(in_turn(), tmp_path, forks)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in NAMES if name != in_turn()])
def test_without_a_folder_the_demo_model_generates_the_same(name: str, tmp_path: Path, forks: Forks) -> None:
    check_without(name, tmp_path, forks)
