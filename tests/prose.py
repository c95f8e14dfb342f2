"""A reader of the project's sentences: it finds words and openings that CONTRIBUTING.md rules out.

``python -m tests.prose [FILE or FOLDER ...]`` prints a line for each; ``tests/test_prose.py`` holds their number at 0.
It reads docstrings, comments and texts of Python files, and Markdown outside code.
"""

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
TREES = ("callboard", "engine", "server", "docs", "README.md", "CONTRIBUTING.md")
# People's words for things, and verbs of speech for calls and messages.
WORDS = re.compile(
    r"\b(who|whoever|whom|whomever|nobody|somebody|everybody|anybody|someone|everyone|anyone|tell|tells|told|telling|"
    r"hear|hears|heard|likewise|lest)\b",
    re.IGNORECASE,
)
# What a docstring that is no sentence begins with: a field's name, or a word that leans on something before it.
FIELD = re.compile(r"(?:``)?[a-z_]\w*(?:``)?(?:, [a-z_]\w*)*:(?: |$)")
LEANING = re.compile(
    r"(Of|For|To|By|With|In|On|At|From|As|See|Also|And|Or|But|Where|When|What|Who|Which|How|Why|If|Unless|Because|Since|"
    r"Likewise|Nothing|None|Those|Theirs|Its|Same|Neither|Not|Behind|Beside)\b"
)
TEXT = re.compile(r"[A-Za-z]+ [a-z]+ ")  # a string that is a sentence and no name, pattern or key
Finding = tuple[int, str]


def of_words(line: int, text: str) -> Iterator[Finding]:
    """The ruled-out words of a text that begins at ``line``."""
    for found in WORDS.finditer(re.sub(r"``?[^`]*``?", lambda code: " " * len(code[0]), text)):
        yield line + text.count("\n", 0, found.start()), f"the word {found[0]!r}"


def of_docstring(node: ast.AST) -> Iterator[Finding]:
    """The opening of a docstring that is a fragment."""
    if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        return
    if (text := ast.get_docstring(node)) and (LEANING.match(text) or FIELD.match(text) or text[0].islower()):
        yield node.body[0].lineno, f"a docstring that begins {' '.join(text.split()[:5])!r}"


def of_python(source: str) -> list[Finding]:
    """Every finding in a module, by line."""
    findings: list[Finding] = []
    tree = ast.parse(source)
    for node in ast.walk(tree):
        findings += of_docstring(node)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and TEXT.search(node.value):
            findings += of_words(node.lineno, node.value)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            findings += of_words(token.start[0], token.string)
    return sorted(set(findings))


def of_markdown(source: str) -> list[Finding]:
    """Every finding outside fenced code."""
    findings: list[Finding] = []
    fenced = False
    for number, line in enumerate(source.splitlines(), 1):
        fenced ^= line.lstrip().startswith("```")
        if not fenced:
            findings += of_words(number, line)
    return findings


def findings(paths: list[str]) -> list[str]:
    """'<file>:<line>: <finding>' of files and of all that lies below folders."""
    found: list[str] = []
    for name in paths:
        place = ROOT / name
        files = sorted(one for one in place.rglob("*") if one.suffix in (".py", ".md")) if place.is_dir() else [place]
        for file in files:
            of = of_python if file.suffix == ".py" else of_markdown
            found += [f"{file.relative_to(ROOT)}:{line}: {what}" for line, what in of(file.read_text())]
    return found


if __name__ == "__main__":
    found = findings(sys.argv[1:] or list(TREES))
    print("\n".join(found))
    sys.exit(bool(found))
