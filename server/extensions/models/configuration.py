"""A configuration with [[models]]: that of each model is the file's, with its own sections laid over.

Owns: how the tables are read and checked.  Does not know: what a section says, which models run.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import msgspec

from engine.config import Config, WrittenConfig, read_written
from engine.types.errors import ConfigError
from server.extensions.models.settings import ModelTable

NAME = ModelTable.table
HEADER = re.compile(rf"^[ \t]*\[\[\s*{NAME}\s*\]\]", re.MULTILINE)


class ServedModel(NamedTuple):
    """One of several models.  config: the file's sections with its own laid over them."""

    table: ModelTable
    config: Config


class SeveralModels(Config, frozen=True, kw_only=True):
    """The whole of a callboard.toml with [[models]]: the sections that hold for all of them, and each by itself."""

    array: ClassVar[str] = NAME

    models: tuple[ServedModel, ...]


def read_several(
    path: Path | None, overrides: Sequence[str], environment: Mapping[str, str] | None = None
) -> SeveralModels | None:
    """Read a file with [[models]]; return None for one without.

    What the environment and ``overrides`` lay over the file holds for every model, whatever its own sections say.
    Raises ConfigError as ``load_config`` does."""
    written = read_written(path)
    table = written.table
    tables = _tables(table.pop(NAME, []), written)
    if not tables:
        return None
    written.check(table, Config, written.text)  # so that an error names the file, not an override
    models = []
    for number, one in enumerate(tables):
        own = table | {name: {**table.get(name, {}), **keys} for name, keys in one.sections().items()}
        written.check(own, Config, _text_of(number, written.text), (NAME,))
        config = written.read(own, overrides, environment, f": [[{NAME}]] {one.name}")
        named = msgspec.structs.replace(config.model, name=one.name)  # what requests choose by, whatever was laid over
        models.append(ServedModel(one, msgspec.structs.replace(config, model=named)))
    shared = written.read(table, overrides, environment)
    return SeveralModels(**msgspec.structs.asdict(shared), models=tuple(models))


def _tables(given: Any, written: WrittenConfig) -> list[ModelTable]:
    """The [[models]] of a file, checked by themselves.  Raises ConfigError."""
    if not isinstance(given, list):
        raise ConfigError(f"{written.origin}: {NAME}: expected [[{NAME}]], one table for each model")
    tables: list[ModelTable] = []
    for number, one in enumerate(given):
        table = written.check(one, ModelTable, _text_of(number, written.text), (NAME,))
        if table.name in [other.name for other in tables]:
            raise ConfigError(
                f"{written.origin}: two [[{NAME}]] are called {table.name!r}; requests choose by the name"
            )
        tables.append(table)
    return tables


def _text_of(number: int, text: str) -> str:
    """The text with nothing but its line breaks before the header of a model, and nothing behind that of the next."""
    starts = [found.start() for found in HEADER.finditer(text)]
    if number >= len(starts):
        return ""
    end = starts[number + 1] if number + 1 < len(starts) else len(text)
    return "\n" * text.count("\n", 0, starts[number]) + text[starts[number] : end]
