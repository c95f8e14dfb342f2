"""docs/configuration.md has every setting as the code has it: ``python -m tests.test_configuration_page`` writes it."""

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from engine.config import Config, json_schema
from engine.control.changes import changed, is_place
from engine.settings.additions import arrays

DOCS = Path(__file__).parents[1] / "docs"
PAGE = DOCS / "configuration.md"
INTRODUCTION = """\
# Configuration

The configuration is one TOML file; every key has a default. `callboard config` prints all keys with their defaults,
`callboard config FILE.toml` all values with the file applied, `callboard config --schema` the JSON Schema of the file.
An unknown key or an invalid value is an error that names both.

A value comes from the first of these that has it: `--set section.key=value` on the command line, the environment
variable `CALLBOARD_SECTION__KEY`, the file, the default. On the command line and in the environment, a value that is
not TOML is a string.

```console
$ callboard serve my.toml --set kv.page_size=64 --set 'plugins.attention={ decode = "torch" }'
$ CALLBOARD_SERVER__API_KEY="$(openssl rand -hex 32)" callboard serve my.toml --host 0.0.0.0
```

Most settings can be changed while the server runs, without ending its streams: by `callboard apply my.toml`, or by a
SIGHUP, after which the server reads its file again ([operations.md](operations.md#settings-that-change)). The column
*changes* shows how:

- *live*: at once;
- *executors*: by new executors, to which the streams move;
- *fixed*: not at all, only by a restart;
- *by the file*: in the server's own file only, not by a request.

For `[[models]]` see also [several_models.md](several_models.md), for `scheduler` and `kv`
[scheduling.md](scheduling.md), for `plugins` [plugins.md](plugins.md). `python -m tests.test_configuration_page` writes
these tables from `engine/settings/sections.py` and the `settings.py` of the folders that have settings.
"""


def sections() -> dict[str, type[msgspec.Struct]]:
    own = {name: type(getattr(Config(), name)) for name in Config.__struct_fields__}
    return {**own, **{f"[{one.table}]": one for one in arrays()}}


def rows(section: type[msgspec.Struct]) -> list[str]:
    """A Markdown row for each key of a section."""
    properties = json_schema()["$defs"][section.__name__]["properties"]
    return [
        f"| `{key}` | {' | '.join((values(about), default(about.get('default', '')), changes(section, key)))} | "
        f"{about['description']} |"
        for key, about in properties.items()
    ]


def changes(section: type[msgspec.Struct], key: str) -> str:
    """How a key changes while the server runs."""
    how = changed(section, key)
    return f"{how}, by the file" if how != "fixed" and is_place(section, key) else how


def values(about: dict[str, Any]) -> str:
    """What a key may be set to."""
    if "enum" in about:
        return ", ".join(f"`{value}`" for value in about["enum"])
    if "anyOf" in about:
        return " or ".join(values(one) if "type" in one else "table" for one in about["anyOf"])
    kind = {"integer": "int", "number": "float", "array": "list of strings", "object": "table"}
    words = [kind.get(about["type"], about["type"])]
    bounds = {"minimum": "from", "exclusiveMinimum": "above", "maximum": "to"}
    words += [f"{word} {about[bound]}" for bound, word in bounds.items() if bound in about]
    return " ".join(words)


def default(value: object) -> str:
    return "" if value == "" else f"`{msgspec.json.encode(value).decode()}`"


def render() -> str:
    parts = [INTRODUCTION]
    for name, section in sections().items():
        about = (section.__doc__ or "").partition(": ")[2]
        head = [
            f"## `[{name}]`",
            "",
            about[:1].upper() + about[1:],
            "",
            "| key | values | default | changes | |",
            "|---|---|---|---|---|",
        ]
        parts.append("\n".join([*head, *rows(section)]) + "\n")
    return "\n".join(parts)


@pytest.mark.parametrize("name", sections())
def test_every_setting_is_in_the_page_as_it_is_in_the_code(name: str) -> None:
    _, _, after = PAGE.read_text().partition(f"\n## `[{name}]`\n")
    found = re.findall(r"^\| `.*$", after.partition("\n## ")[0], re.MULTILINE)
    assert found == rows(sections()[name]), "run python -m tests.test_configuration_page"


def test_every_setting_that_the_pages_speak_of_exists() -> None:
    known = {f"{name.strip('[]')}.{key}" for name, section in sections().items() for key in section.__struct_fields__}
    spoken = {
        f"{match[1]}.{match[2]}"
        for page in DOCS.glob("*.md")
        for match in re.finditer(rf"`({'|'.join(Config.__struct_fields__)})\.(\w+)(?: ?=[^`]*)?`", page.read_text())
    }
    assert spoken <= known, f"no such settings: {sorted(spoken - known)}"


if __name__ == "__main__":
    PAGE.write_text(render())
