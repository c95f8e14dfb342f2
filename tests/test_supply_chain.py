"""What `make serve` installs has hashes, of the versions of constraints.txt, and a list of it can be made."""

import json
import re
import sys
from pathlib import Path

import pytest

from tests import sbom
from tests.hashes import (
    BUILDING,
    FILE,
    IMAGES_FILE,
    ROOT,
    SIMPLE_JSON,
    hashes,
    lines,
    needed,
    pinned,
    serving,
    tracing,
)

PINNED = pinned((ROOT / "constraints.txt").read_text())
MAKEFILE = (ROOT / "Makefile").read_text()


def test_every_package_that_serving_or_building_needs_has_a_version_and_hashes() -> None:
    found = sbom.hashes_of(FILE.read_text())
    assert found.keys() == serving() | needed(BUILDING)
    assert all(found.values())
    assert pinned(FILE.read_text()) == {name: PINNED[name] for name in found}


def test_every_package_that_the_images_need_for_traces_has_a_version_and_hashes() -> None:
    pytest.importorskip("opentelemetry.sdk", reason="what it needs is looked up in its installation")
    found = sbom.hashes_of(IMAGES_FILE.read_text())
    assert found.keys() == tracing()
    assert all(found.values())
    assert pinned(IMAGES_FILE.read_text()) == {name: PINNED[name] for name in found}


def test_torch_alone_is_left_out_of_what_is_imported() -> None:
    assert "torch" not in serving()
    direct = set(re.findall(r'^    "([\w-]+)[<>=]', (ROOT / "pyproject.toml").read_text(), re.MULTILINE))
    imported = {name.replace("_", "-") for name in direct} & PINNED.keys()
    assert {"aiohttp", "msgspec", "numpy", "uvloop"} <= imported & serving()


def test_make_serve_installs_by_hashes_and_fetches_nothing_else_than_torch() -> None:
    recipe = MAKEFILE.partition("\n$(SERVES):")[2].partition("\n\n")[0]
    installs = re.findall(r"^\t(\$\(PIP\w*\).*)$", recipe, re.MULTILINE)
    by_hashes, torch, ours = installs
    assert "--require-hashes --only-binary :all: --requirement requirements.txt" in by_hashes
    assert '"torch==' in torch
    assert "--no-deps --no-build-isolation --editable ." in ours
    assert recipe.startswith(" pyproject.toml constraints.txt requirements.txt")


def test_an_editable_install_needs_no_package_that_has_no_hashes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build = pytest.importorskip("hatchling.build", reason="only `make serve` installs hatchling")
    hashed = pinned(FILE.read_text())
    for optional in {"editables"} - hashed.keys():
        monkeypatch.setitem(sys.modules, optional, None)  # hatchling asks for it, unless a folder is named
    monkeypatch.chdir(ROOT)
    build.build_editable(str(tmp_path))
    assert list(tmp_path.glob("callboard-*.whl"))


def test_what_an_index_lists_becomes_the_hashes_of_one_release() -> None:
    files = [
        {"filename": "a_b-1.0-py3-none-any.whl", "hashes": {"sha256": "2" * 64}},
        {"filename": "a_b-1.0.tar.gz", "hashes": {"sha256": "1" * 64}},
        {"filename": "a_b-1.0-py3.11.egg", "hashes": {"sha256": "3" * 64}},
        {"filename": "a_b-1.0.1-py3-none-any.whl", "hashes": {"sha256": "4" * 64}},
        {"filename": "a_b-1.0-py2-none-any.whl", "hashes": {"sha256": "5" * 64}, "yanked": "broken"},
    ]
    assert hashes(files, "1.0") == ["1" * 64, "2" * 64]
    assert lines("a-b", "1.0", ["1" * 64]) == f"a-b==1.0 \\\n    --hash=sha256:{'1' * 64}\n"
    assert "json" in SIMPLE_JSON


def test_the_list_of_components_is_cyclonedx_and_names_each_once(tmp_path: Path) -> None:
    sbom.main(tmp_path / "sbom.json")
    found = json.loads((tmp_path / "sbom.json").read_text())
    assert (found["bomFormat"], found["metadata"]["component"]["name"]) == ("CycloneDX", "callboard")
    names = [one["name"] for one in found["components"]]
    assert names == sorted(set(names))
    assert {"aiohttp", "torch"} <= set(names)
    (aiohttp,) = [one for one in found["components"] if one["name"] == "aiohttp"]
    assert aiohttp["version"] == PINNED["aiohttp"]
    assert len(aiohttp["properties"]) > 10


@pytest.mark.parametrize("said", ["## Supported versions", "## What to expect", "newest minor version"])
def test_security_says_what_to_expect(said: str) -> None:
    assert said in (ROOT / "SECURITY.md").read_text()
