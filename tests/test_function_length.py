"""No function is longer than a screen: 60 lines, docstring included.  Kernels are exempt: they are one loop each."""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
TREES = ("callboard", "engine", "server")
MOST_LINES = 60


def long_functions(name: str, source: str) -> Iterator[str]:
    """'<file>: <function>' of each function that is too long and is no Triton kernel."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            is_kernel = any("triton.jit" in ast.unparse(decorator) for decorator in node.decorator_list)
            assert node.end_lineno is not None
            if node.end_lineno - node.lineno + 1 > MOST_LINES and not is_kernel:
                yield f"{name}: {node.name}"


def test_no_function_is_longer_than_sixty_lines() -> None:
    body = "    x = 1\n" * MOST_LINES
    assert list(long_functions("a.py", f"def f():\n{body}")) == ["a.py: f"]
    assert list(long_functions("a.py", f"async def f():\n{body}")) == ["a.py: f"]
    assert not list(long_functions("a.py", f"def f():\n{body[10:]}"))
    assert not list(long_functions("a.py", f"@triton.jit(do_not_specialize=['n'])\ndef f():\n{body}"))
    paths = sorted(path for tree in TREES for path in (ROOT / tree).rglob("*.py"))
    assert len(paths) > 400
    found = {one for path in paths for one in long_functions(path.relative_to(ROOT).as_posix(), path.read_text())}
    assert not found
