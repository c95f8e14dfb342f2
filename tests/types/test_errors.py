"""engine/types/errors.py draws the whole tree: every deliberate error, wherever it is defined, stands in it."""

import ast
from pathlib import Path

from engine.types import errors

ROOT = Path(__file__).parents[2]


def test_every_error_is_in_the_tree() -> None:
    bases = {
        node.name: {ast.unparse(base) for base in node.bases}
        for folder in ("engine", "server", "callboard")
        for path in (ROOT / folder).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
    }
    ours = {"CallboardError"}
    while more := {name for name, of in bases.items() if of & ours} - ours:
        ours |= more
    assert len(ours) > 10
    assert [name for name in sorted(ours) if name not in (errors.__doc__ or "")] == []
