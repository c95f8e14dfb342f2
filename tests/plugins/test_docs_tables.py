"""docs/plugins.md has tables made from docstrings: ``python -m tests.plugins.test_docs_tables`` writes them."""

import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest

from callboard import plugins
from callboard.plugins import CallReader, Candidate

PAGE = Path(__file__).parents[2] / "docs" / "plugins.md"
MARKED = r"(<!-- made: {name} -->\n).*?(<!-- end -->)"
OF_THE_ENGINE = ("read", "push", "finish")  # the first one a parser writes; the engine calls the others
NAMED = re.compile(r"(?:^|(?<=[.;]  ))(\w+(?:, \w+)*): ", re.MULTILINE)


def words(text: str | None) -> str:
    """A docstring as the cell of a table."""
    return " ".join(inspect.cleandoc(text or "").replace("``", "`").split()).replace("|", "\\|")


def parameters(method: Callable[..., Any]) -> str:
    """As they stand in a call, without types."""
    given = list(inspect.signature(method).parameters.values())[1:]
    kept = [one.replace(annotation=inspect.Parameter.empty) for one in given]
    return str(inspect.Signature(kept))


def verbs() -> Iterator[str]:
    yield "| verb | returns | |\n|---|---|---|"
    for name, verb in vars(CallReader).items():
        if name.startswith("_") or name in OF_THE_ENGINE:
            continue
        if isinstance(verb, property):
            yield f"| `{name}` | | {words(verb.__doc__)} |"
            continue
        call, result = name + parameters(verb), ""
        if inspect.isgeneratorfunction(verb):
            call = f"yield from {call}"
            kind = get_args(inspect.signature(verb).return_annotation)[2]
            result = "" if kind is type(None) else f"`{inspect.formatannotation(kind)}`".replace(" | ", " or ")
        yield f"| `{call}` | {result} | {words(verb.__doc__)} |"


def candidate() -> Iterator[str]:
    yield "| field | |\n|---|---|"
    _, *parts = NAMED.split(inspect.cleandoc(Candidate.__doc__ or ""))
    for names, text in zip(parts[::2], parts[1::2], strict=True):
        yield f"| {', '.join(f'`{name}`' for name in names.split(', '))} | {words(text)} |"


def shapes() -> list[type[msgspec.Struct]]:
    return [kind for name, kind in vars(plugins).items() if is_shape(name, kind)]


def is_shape(name: str, kind: object) -> bool:
    in_place = isinstance(kind, type) and kind.__module__ == "engine.checkpoints.shape"
    return in_place and issubclass(kind, msgspec.Struct) and name != "PartShape"  # type: ignore[arg-type]


def parts() -> Iterator[str]:
    yield "| part | fields | |\n|---|---|---|"
    for kind in shapes():
        fields = [
            field.name if field.required else f"{field.name}={default(field)}" for field in msgspec.structs.fields(kind)
        ]
        yield f"| `{kind.__name__}` | {', '.join(f'`{field}`' for field in fields)} | {words(kind.__doc__)} |"


def default(field: msgspec.structs.FieldInfo) -> str:
    value = field.default if field.default is not msgspec.NODEFAULT else field.default_factory()  # type: ignore[operator]
    return type(value).__name__ + "()" if isinstance(value, msgspec.Struct) else repr(value)


TABLES: dict[str, Callable[[], Iterator[str]]] = {"verbs": verbs, "candidate": candidate, "parts": parts}


@pytest.mark.parametrize("name", TABLES)
def test_a_table_is_as_the_docstrings_are(name: str) -> None:
    found = re.search(MARKED.format(name=name), PAGE.read_text(), re.DOTALL)
    assert found, f"docs/plugins.md has no place for {name}"
    made = "\n".join(TABLES[name]())
    assert found[0] == f"{found[1]}\n{made}\n\n{found[2]}", "run python -m tests.plugins.test_docs_tables"


def test_every_field_of_a_candidate_is_in_its_table() -> None:
    made = "\n".join(candidate())
    assert all(f"`{name}`" in made for name, field in vars(Candidate).items() if isinstance(field, property))


if __name__ == "__main__":
    text = PAGE.read_text()
    for table, rows in TABLES.items():
        made = "\n".join(rows()).replace("\\", "\\\\")
        text = re.sub(MARKED.format(name=table), rf"\1\n{made}\n\n\2", text, flags=re.DOTALL)
    PAGE.write_text(text)
