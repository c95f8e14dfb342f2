"""A folder of engine/features can be deleted: the rest imports and generates the same tokens."""

import hashlib
import os
import re
import shutil
import subprocess
import sys
from functools import cache
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


@cache
def generated(folder: Path) -> str:
    """The output of the tree in a folder, in a process of its own."""
    environment = {**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        [sys.executable, "-c", GENERATE], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return re.sub(r"request_id=[^,)]*|[a-z_]+_s=[\d.e-]+", "", result.stdout)


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


def check_without(name: str, folder: Path) -> None:
    """Check that a tree without a feature, and what goes with it, generates the same."""
    (folder / "examples").symlink_to(ROOT / "examples")
    gone = own_folders(name)
    for copied in ("callboard", "engine", "server"):
        shutil.copytree(
            ROOT / copied,
            folder / copied,
            ignore=lambda path, names: {one for one in names if Path(path, one) in gone},
        )  # with what Python compiled, which it would do again
    assert generated(folder) == generated(ROOT)


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


def test_without_one_folder_in_turn_the_demo_model_generates_the_same(tmp_path: Path) -> None:
    check_without(in_turn(), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_without_a_folder_the_demo_model_generates_the_same(name: str, tmp_path: Path) -> None:
    check_without(name, tmp_path)
