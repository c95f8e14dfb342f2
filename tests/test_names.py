"""Names: a class name stands for one class, and a function is named by what it does, in the words of the field."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
TREES = ("callboard", "engine", "server")
# Class names of more than one file -> why they are.
DOUBLED: dict[str, str] = {}
# Functions send, return, call and read; a search for one of these words finds nothing that says what is done.
SPEECH = re.compile(r"_*(tell|tells|told|say|says|said|hear|hears|heard|came|went)(_.*)?")
# Functions that are called so -> why they are.
SPOKEN = {
    "engine/text/call_reader.py: say": "the interface of tool parsers, API 1 of plugins",
    "engine/text/call_reader.py: told": "the interface of tool parsers, API 1 of plugins",
}


def definitions(kinds: type[ast.AST] | tuple[type[ast.AST], ...]) -> Iterator[tuple[str, str]]:
    """The file and the name of each definition of these kinds."""
    for path in sorted(path for tree in TREES for path in (ROOT / tree).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, kinds):
                yield path.relative_to(ROOT).as_posix(), node.name  # type: ignore[attr-defined]


def test_no_two_files_define_a_class_of_one_name() -> None:
    files = defaultdict(set)
    for file, name in definitions(ast.ClassDef):
        files[name].add(file)
    assert len(files) > 900
    doubled = {name: sorted(found) for name, found in files.items() if len(found) > 1}
    assert set(doubled) == set(DOUBLED), doubled


def test_no_function_is_called_by_a_verb_of_speech() -> None:
    assert all(map(SPEECH.fullmatch, ("tell", "_told", "came", "went", "tell_end", "heard")))
    assert not any(map(SPEECH.fullmatch, ("tellers", "heartbeat", "camera", "essay", "send")))
    found = {f"{file}: {name}" for file, name in definitions((ast.FunctionDef, ast.AsyncFunctionDef))
             if SPEECH.fullmatch(name)}  # fmt: skip
    assert found == set(SPOKEN)
