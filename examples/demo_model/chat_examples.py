"""Owns the ChatML examples mixed into training: how questions are asked and answered.

Answers are functions cut out of the training files with `ast`; questions are made from their
names, signatures and docstrings.
"""

import ast
import random
import textwrap
from dataclasses import dataclass

IM_START = "<|im_start|>"
IM_END = "<|im_end|>"
MAX_ANSWER = 1400
MIN_ANSWER = 60
SYSTEM_SHARE = 0.3
TWO_TURN_SHARE = 0.15
SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You write Python code.",
    "You are a coding assistant.",
)


@dataclass(frozen=True)
class Function:
    """A function cut out of a source file."""

    name: str
    arguments: str
    summary: str
    source: str


def turn(role: str, content: str) -> str:
    """One ChatML turn; the chat template renders exactly this."""
    return f"{IM_START}{role}\n{content}{IM_END}\n"


def functions_in(text: str) -> list[Function]:
    """The functions and methods of one file whose source makes an answer of a sensible length."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):
        return []
    lines = text.splitlines(keepends=True)
    found: list[Function] = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef) or node.end_lineno is None:
            continue
        source = textwrap.dedent("".join(lines[node.lineno - 1 : node.end_lineno])).rstrip()
        if MIN_ANSWER <= len(source) <= MAX_ANSWER and source.startswith("def "):
            doc = (ast.get_docstring(node) or "").strip().split("\n\n")[0]
            summary = " ".join(doc.split())
            arguments = ", ".join(arg.arg for arg in node.args.args)
            found.append(Function(node.name, arguments, summary, source))
    return found


def question(function: Function, rng: random.Random) -> str:
    """A request whose answer is `function`."""
    name, arguments = function.name, function.arguments
    plain = (
        f"Write a function named {name}.",
        f"Write a function named {name}",
        f"Write a Python function called {name}.",
        f"Write a Python function {name}({arguments}).",
        f"Write {name}({arguments}) in Python.",
        f"Please write a function named {name} in Python.",
        f"def {name}({arguments}):",
        f"Can you write a function {name}?",
    )
    if not function.summary or len(function.summary) > 200:
        return rng.choice(plain)
    summary = function.summary
    described = (
        f"Write a function named {name}: {summary}",
        f"Write a Python function {name}({arguments}). {summary}",
        f"Write a Python function. {summary}",
        f"Write a function that does this: {summary}",
        f"{summary}",
    )
    return rng.choice(plain + described + described)


def exchange(function: Function, rng: random.Random) -> str:
    """One question and its answer, as two turns."""
    if function.summary and rng.random() < 0.08:
        return turn("user", f"What does this do?\n\n{function.source}") + turn("assistant", function.summary)
    return turn("user", question(function, rng)) + turn("assistant", function.source)


def chat_documents(texts: list[str], rng: random.Random, budget: int) -> list[str]:
    """Conversations made from `texts`, about `budget` characters in all."""
    functions = [function for text in texts for function in functions_in(text)]
    rng.shuffle(functions)
    # Documented functions first: when the budget is short, the better questions stay.
    functions.sort(key=lambda function: not function.summary)
    chosen: list[str] = []
    used = 0
    for function in functions:
        if used >= budget:
            break
        chosen.append(exchange(function, rng))
        used += len(chosen[-1])
    rng.shuffle(chosen)
    documents: list[str] = []
    while chosen:
        document = chosen.pop()
        if chosen and rng.random() < TWO_TURN_SHARE:
            document += chosen.pop()
        if rng.random() < SYSTEM_SHARE:
            document = turn("system", rng.choice(SYSTEM_PROMPTS)) + document
        documents.append(document)
    return documents
