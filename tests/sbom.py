"""Writes sbom.json, a CycloneDX list of what serving needs: ``make sbom``.

Owns: the shape of the list.  Does not know: which packages there are, how they were found.
Versions and licenses are those that are installed here; hashes are of all files of a release, as requirements.txt has
them.  torch and what its build for CUDA brings along are listed without.
"""

import json
import re
from importlib.metadata import PackageNotFoundError, distributions, metadata
from pathlib import Path
from typing import Any

from packaging.utils import canonicalize_name

from tests.hashes import FILE, LEFT_OUT_PREFIXES, ROOT, serving

WRITTEN = ROOT / "sbom.json"


def components() -> list[dict[str, Any]]:
    """Returns every package that serving needs here, by its name."""
    known = hashes_of(FILE.read_text())
    names = {name for name in serving() if _is_installed(name)}
    names |= {
        one for one in map(_name, distributions()) if one in ("torch", "triton") or one.startswith(LEFT_OUT_PREFIXES)
    }
    return [_component(name, known.get(name, [])) for name in sorted(names)]


def hashes_of(text: str) -> dict[str, list[str]]:
    """Returns the hashes of each package of a file as ``tests.hashes`` writes it."""
    found: dict[str, list[str]] = {}
    for block in re.split(r"\n(?=[a-z])", text):
        if (named := re.match(r"([a-z0-9-]+)==", block)) is not None:
            found[named[1]] = re.findall(r"--hash=sha256:([0-9a-f]{64})", block)
    return found


def _name(one: Any) -> str:
    return canonicalize_name(one.metadata["Name"])


def _is_installed(name: str) -> bool:
    try:
        metadata(name)
    except PackageNotFoundError:
        return False
    return True


def _component(name: str, hashes: list[str]) -> dict[str, Any]:
    about = metadata(name)
    version = about["Version"]
    licensed = about.get("License-Expression") or about.get("License", "").partition("\n")[0]
    return {
        "type": "library",
        "name": name,
        "version": version,
        "purl": f"pkg:pypi/{name}@{version.partition('+')[0]}",
        **({"licenses": [{"license": {"name": licensed}}]} if licensed else {}),
        **({"properties": [{"name": "sha256", "value": one} for one in hashes]} if hashes else {}),
    }


def document() -> dict[str, Any]:
    """Returns the whole list."""
    ours = metadata("callboard")
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": {"type": "application", "name": "callboard", "version": ours["Version"]}},
        "components": components(),
    }


def main(path: Path = WRITTEN) -> None:
    path.write_text(json.dumps(document(), indent=1) + "\n")


if __name__ == "__main__":
    main()
