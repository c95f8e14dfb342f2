"""Writes requirements.txt, what serving needs with the hash of every file of each release: ``make hashes INDEX=URL``.

Owns: which packages serving needs on any platform, and how pip wants hashes.  Does not know: how they are installed.
The versions are those of constraints.txt.  torch is not among them: its builds for CPUs and for CUDA are other files
with one version, and an index of their own has the hashes.  Nor is what torch's build for CUDA brings along.
"""

import argparse
import json
import re
import urllib.request
from collections.abc import Iterable, Iterator
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name, parse_sdist_filename, parse_wheel_filename

ROOT = Path(__file__).parents[1]
FILE = ROOT / "requirements.txt"
IMAGES_FILE = ROOT / "deploy" / "requirements.txt"
HEADER = """\
# What `make serve` installs beside torch, with the hashes of each release's files.  Made by `make hashes INDEX=URL`.
"""
IMAGES_HEADER = """\
# What the images install beside ../requirements.txt, for traces.  Made by `make hashes INDEX=URL`.
"""
SIMPLE_JSON = "application/vnd.pypi.simple.v1+json"
BUILDING = (
    "hatchling",
    "hatch-fancy-pypi-readme",
    "pathspec",
    "tomlkit",
    "trove-classifiers",
)  # what makes callboard itself
LEFT_OUT = frozenset({"torch", "triton", "setuptools"})
LEFT_OUT_PREFIXES = ("nvidia-", "cuda-")
PLATFORMS = (("linux", "Linux", "x86_64"), ("linux", "Linux", "aarch64"), ("darwin", "Darwin", "arm64"))
ENVIRONMENTS = [
    {"python_version": version, "python_full_version": f"{version}.0", "platform_python_implementation": "CPython",
     "implementation_name": "cpython", "sys_platform": system, "platform_system": name, "os_name": "posix",
     "platform_machine": machine, "extra": ""}
    for version in ("3.11", "3.12", "3.13")
    for system, name, machine in PLATFORMS
]  # fmt: skip


def pinned(text: str) -> dict[str, str]:
    """Returns the version of each package of constraints.txt."""
    return {canonicalize_name(name): version for name, version in re.findall(r"^([\w.-]+)==(\S+)", text, re.MULTILINE)}


def needed(roots: Iterable[str]) -> set[str]:
    """Returns what these packages need on any platform, and themselves; of what is installed here."""
    found: set[str] = set()
    waiting = [canonicalize_name(name) for name in roots]
    while waiting:
        name = waiting.pop()
        if name in found or name in LEFT_OUT or name.startswith(LEFT_OUT_PREFIXES):
            continue
        found.add(name)
        waiting += [canonicalize_name(one.name) for one in _requirements(name)]
    return found


def _requirements(name: str) -> Iterator[Requirement]:
    try:
        lines = requires(name) or ()
    except PackageNotFoundError:
        return
    for one in map(Requirement, lines):
        if one.marker is None or any(one.marker.evaluate(environment) for environment in ENVIRONMENTS):
            yield one


def serving() -> set[str]:
    """Returns every package that serving needs beside torch, and those that torch needs."""
    return needed([*(one.name for one in _requirements("callboard")), *(one.name for one in _requirements("torch"))])


def tracing() -> set[str]:
    """Returns every package that traces need and serving does not."""
    extra = {**ENVIRONMENTS[0], "extra": "otel"}
    wanted = (Requirement(line) for line in requires("callboard") or ())
    roots = [one.name for one in wanted if one.marker is not None and one.marker.evaluate(extra)]
    return needed(roots) - serving()


def hashes(files: Iterable[dict[str, Any]], version: str) -> list[str]:
    """Returns the hashes of the files of a release.  files: as the index lists them."""
    return sorted(
        file["hashes"]["sha256"]
        for file in files
        if _version_of(file["filename"]) == version and not file.get("yanked")
    )


def _version_of(filename: str) -> str:
    try:
        if filename.endswith(".whl"):
            return str(parse_wheel_filename(filename)[1])
        return str(parse_sdist_filename(filename)[1])
    except ValueError:
        return ""  # an egg, or an installer of long ago


def fetched(index: str, name: str) -> list[dict[str, Any]]:
    """Returns the files of a package, as the index lists them."""
    asked = urllib.request.Request(f"{index.rstrip('/')}/{name}/", headers={"Accept": SIMPLE_JSON})
    with urllib.request.urlopen(asked, timeout=60) as answer:
        files: list[dict[str, Any]] = json.load(answer)["files"]
    return files


def lines(name: str, version: str, found: list[str]) -> str:
    """Returns one package as pip reads it."""
    return " \\\n    ".join([f"{name}=={version}", *(f"--hash=sha256:{one}" for one in found)]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "index", help="a package index with the JSON API of PEP 691, such as https://index.example/simple"
    )
    index = parser.parse_args().index
    FILE.write_text(HEADER + _all_lines(index, serving() | needed(BUILDING)))
    IMAGES_FILE.write_text(IMAGES_HEADER + _all_lines(index, tracing()))


def _all_lines(index: str, names: Iterable[str]) -> str:
    """Returns packages as pip reads them, in the versions of constraints.txt.  Raises SystemExit."""
    versions, text = pinned((ROOT / "constraints.txt").read_text()), ""
    for name in sorted(names):
        if name not in versions:
            raise SystemExit(f"constraints.txt has no version of {name}")
        if not (found := hashes(fetched(index, name), versions[name])):
            raise SystemExit(f"{index} has no file of {name} {versions[name]}")
        text += lines(name, versions[name], found)
    return text


if __name__ == "__main__":
    main()
