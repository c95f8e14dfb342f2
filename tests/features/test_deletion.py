"""A folder of engine/features can be deleted: the rest imports and generates the same tokens."""

import hashlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FEATURES = ROOT / "engine" / "features"
EXTENSIONS = ROOT / "server" / "extensions"
NAMES = sorted(path.parent.name for path in FEATURES.glob("*/__init__.py"))
DELETABLE = [name for name in NAMES if name != "lora"]
# The product's files outside of a folder that import from it.  A folder without any can be deleted alone.
IMPORTERS = {
    "explain": set(),
    "grammar": set(),
    "host_tier": set(),
    "kv_store": set(),
    "lora": {
        "engine/control/changes.py",
        "engine/control/system.py",
        "server/adapters.py",
        "server/extensions/doctor/doctor.py",
        "server/model_card.py",
    },
    "pooling": {"engine/llm.py"},
    "recording": set(),
    "speculation": set(),
    "token_embed": set(),
    "traffic": set(),
}
# Words of a feature, which at most MOST_FILES files outside of its folders may contain.
WORDS = {
    "explain": r"features\.explain|Explanation\b",
    "grammar": r"features\.grammar|GrammarCache",
    "pooling": "[Pp]ooling",
    "recording": "flight recorder|recording_|Record(ing|er)[A-Z]|recordings/",
    "token_embed": "token_embed",
    "traffic": r"trace_mb|features\.traffic|TraceRecorder",
}
MOST_FILES = 3
# Features that build on another one.
BUILT_ON = {"pooling": {"token_embed"}}
# Extensions of the server that face a feature's users under another name.
FACES = {"traffic": "whatif"}
GENERATE = """
from callboard import LLM, SamplingParams
with LLM("examples/demo_model", progress=False) as llm:
    print(llm.generate(["import os", "def f("], SamplingParams(temperature=0, max_tokens=8)))
"""


def in_turn() -> str:
    """A folder: another one when a file of the product comes or goes."""
    files = "\n".join(sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "engine").rglob("*.py")))
    return DELETABLE[int.from_bytes(hashlib.sha256(files.encode()).digest()[:4]) % len(DELETABLE)]


def generated(folder: Path) -> str:
    """The output of the tree in a folder, in a process of its own."""
    environment = {**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        [sys.executable, "-c", GENERATE], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return re.sub(r"request_id=[^,)]*|[a-z_]+_s=[\d.e-]+", "", result.stdout)


def outside(name: str, pattern: str) -> set[str]:
    """The files that match, except those of a feature, of the extension with its name, and of features built on it."""
    matching = re.compile(pattern, re.MULTILINE)
    own = {EXTENSIONS / FACES.get(name, name), *(FEATURES / one for one in {name} | BUILT_ON.get(name, set()))}
    return {
        path.relative_to(ROOT).as_posix()
        for folder in ("callboard", "engine", "server")
        for path in (ROOT / folder).rglob("*.py")
        if not own & set(path.parents) and matching.search(path.read_text())
    }


def test_few_files_outside_import_a_feature() -> None:
    assert set(IMPORTERS) == set(NAMES)
    for name, allowed in IMPORTERS.items():
        assert outside(name, rf"^\s*(?:from|import) engine\.features\.{name}\b") == allowed, name


@pytest.mark.parametrize("name", WORDS)
def test_few_files_outside_name_a_feature(name: str) -> None:
    assert len(found := outside(name, WORDS[name])) <= MOST_FILES, found


@pytest.mark.parametrize("name", NAMES)
def test_a_feature_has_a_page_of_its_own(name: str) -> None:
    assert 5 <= len((FEATURES / name / "README.md").read_text().splitlines()) <= 20


def check_without(name: str, folder: Path) -> None:
    """Check that a tree without a feature, and the extension that faces its users, generates the same."""
    (folder / "examples").symlink_to(ROOT / "examples")
    gone = {FEATURES / name, EXTENSIONS / FACES.get(name, name)}
    for copied in ("callboard", "engine", "server"):
        shutil.copytree(
            ROOT / copied,
            folder / copied,
            ignore=lambda path, names: {one for one in names if one == "__pycache__" or Path(path, one) in gone},
        )
    assert generated(folder) == generated(ROOT)


def test_without_one_folder_in_turn_the_demo_model_generates_the_same(tmp_path: Path) -> None:
    check_without(in_turn(), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", DELETABLE)
def test_without_a_folder_the_demo_model_generates_the_same(name: str, tmp_path: Path) -> None:
    check_without(name, tmp_path)
