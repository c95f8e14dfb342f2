"""A folder of engine/features can be deleted: the rest imports and generates the same tokens."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FEATURES = ROOT / "engine" / "features"
NAMES = sorted(path.parent.name for path in FEATURES.glob("*/__init__.py"))
# The product's files outside of a folder that import from it: of an extension of the server, which goes with it.
IMPORTERS = {
    "explain": {"server/extensions/explain/explanation.py"},
    "host_tier": set(),
    "itl_target": set(),
    "kv_store": set(),
    "late_masks": set(),
    "lora": {
        "server/extensions/adapters/adapters.py",
        "server/extensions/adapters/extension.py",
        "server/extensions/adapters/metrics.py",
    },
    "quarantine": set(),
    "shared_prefix": set(),
    "speculation": set(),
}
# What names a feature, and the folders that are its own.
NAMED = {
    "lora": (r"\blora|LoRA", ("engine/features/lora", "server/extensions/adapters")),
    "speculation": (r"speculat", ("engine/features/speculation", "engine/plugins/proposer")),
    "kv_store": (r"kv_store|KVStore", ("engine/features/kv_store", "engine/plugins/kv_store")),
    "host_tier": (r"host_tier|HostTier|host tier", ("engine/features/host_tier",)),
}
MOST_FILES = 3
MOST_OF = {"host_tier": 7}  # its tree and its pages lie in engine/kv and engine/scheduling
GENERATE = """
from callboard import LLM, SamplingParams
with LLM("examples/demo_model", progress=False) as llm:
    print(llm.generate(["import os", "def f("], SamplingParams(temperature=0, max_tokens=8)))
"""


def generated(folder: Path) -> str:
    """The output of the tree in a folder, in a process of its own."""
    environment = {**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        [sys.executable, "-c", GENERATE], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return re.sub(r"request_id=[^,)]*|[a-z_]+_s=[\d.e-]+", "", result.stdout)


def test_few_files_outside_import_a_feature() -> None:
    assert set(IMPORTERS) == set(NAMES)
    for name, allowed in IMPORTERS.items():
        importing = re.compile(rf"^\s*(?:from|import) engine\.features\.{name}\b", re.MULTILINE)
        outside = {
            path.relative_to(ROOT).as_posix()
            for folder in ("callboard", "engine", "server")
            for path in (ROOT / folder).rglob("*.py")
            if FEATURES / name not in path.parents and importing.search(path.read_text())
        }
        assert outside == allowed, name


@pytest.mark.parametrize("name", NAMED)
def test_few_files_outside_name_a_feature(name: str) -> None:
    pattern, folders = re.compile(NAMED[name][0]), [ROOT / path for path in NAMED[name][1]]
    outside = [
        path.relative_to(ROOT).as_posix()
        for folder in ("callboard", "engine", "server")
        for path in sorted((ROOT / folder).rglob("*.py"))
        if not any(one in path.parents for one in folders) and pattern.search(path.read_text())
    ]
    assert len(outside) <= MOST_OF.get(name, MOST_FILES), outside


@pytest.mark.parametrize("name", NAMES)
def test_a_feature_has_a_page_of_its_own(name: str) -> None:
    assert 5 <= len((FEATURES / name / "README.md").read_text().splitlines()) <= 20


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_without_a_folder_the_demo_model_generates_the_same(name: str, tmp_path: Path) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    gone = {FEATURES / name, *((ROOT / path).parent for path in IMPORTERS[name])}
    for copied in ("callboard", "engine", "server"):
        shutil.copytree(
            ROOT / copied,
            tmp_path / copied,
            ignore=lambda path, names: {one for one in names if one == "__pycache__" or Path(path, one) in gone},
        )
    assert generated(tmp_path) == generated(ROOT)
