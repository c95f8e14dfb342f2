"""The differences between two configurations, and how each of them is applied to a running engine.

Owns: that list, and what a checkpoint must have in common with the one that it replaces.
Does not know: how a change is made, devices, where it comes from.
"""

from pathlib import Path
from typing import Any, Final

import msgspec

from engine.checkpoints.checkpoint import ModelSpec
from engine.config import SECRETS, Config
from engine.plugins.kinds import KINDS
from engine.settings.section import Changed, Section
from engine.settings.sections import PluginsSection
from engine.types.errors import ConfigError

TOKENIZER_FILE: Final = "tokenizer.json"


class Change(msgspec.Struct, frozen=True):
    """A setting that differs.  before, after: its values, '***' for secrets.  changed: how it changes (``Changed``)."""

    key: str
    before: Any
    after: Any
    changed: Changed


def changed(section: type[Section], key: str) -> Changed:
    """Return how a setting changes while the server runs."""
    found: Changed = _extra(section, key).get("changed", section.changed)
    return found


def is_place(section: type[Section], key: str) -> bool:
    """Return whether a setting names a place on disk or network, which only the server's own file may change."""
    return bool(_extra(section, key).get("is_place"))


def _extra(section: type[Section], key: str) -> dict[str, Any]:
    fields = {field.name: field for field in msgspec.inspect.type_info(section).fields}  # type: ignore[attr-defined]
    return getattr(fields[key].type, "extra", None) or {}


def changes(old: Config, new: Config) -> tuple[Change, ...]:
    """Return the settings that differ, in their order in the file; options of plugins one by one."""
    found: list[Change] = []
    for name in Config.__struct_fields__:
        before, after = getattr(old, name), getattr(new, name)
        for key in before.__struct_fields__:
            pair = getattr(before, key), getattr(after, key)
            if pair[0] == pair[1]:
                continue
            if (name, key) == ("plugins", "options"):
                found += _options(before, after)
                continue
            was, now = ("***", "***") if key in SECRETS else msgspec.to_builtins(pair)
            found.append(Change(f"{name}.{key}", was, now, changed(type(before), key)))
    return tuple(found)


def _options(old: PluginsSection, new: PluginsSection) -> list[Change]:
    found: list[Change] = []
    for plugin in dict.fromkeys([*old.options, *new.options]):
        before, after = old.options.get(plugin), new.options.get(plugin)
        if before != after:
            kind = KINDS.get(plugin.partition(".")[0])
            how = changed(PluginsSection, kind.setting if kind is not None else "options")
            found.append(Change(f"plugins.options.'{plugin}'", before, after, how))
    return found


def refuse_fixed(found: tuple[Change, ...]) -> None:
    """Raise ConfigError, naming all of them, if settings change that cannot."""
    fixed = [one for one in found if one.changed == "fixed"]
    if fixed:
        seen = ", ".join(f"{one.key} ({_shown(one.before)}, not {_shown(one.after)})" for one in fixed)
        raise ConfigError(f"{seen}: cannot change while the server runs; undo it, or restart the server with it")


def refuse_places(old: Config, new: Config) -> None:
    """Raise ConfigError, naming all of them without their values, if settings change that no request may change.

    Options of plugins may be paths, so all of them are such settings."""
    named = []
    for one in changes(old, new):
        section, _, name = one.key.partition(".")
        if is_place(type(getattr(old, section)), name.partition(".")[0]):
            named.append(one.key)
    if named:
        raise ConfigError(
            f"{', '.join(named)}: a request cannot change where the server reads and writes, nor options of plugins; "
            "send them as they are, or change the file that the server was started with and reload it with SIGHUP or "
            "`callboard apply` without a file"
        )


def refuse_more_requests(most: int, new: Config) -> None:
    """Raise ConfigError for more requests than the mailboxes were made for.  most: the number at the start."""
    if new.limits.max_requests > most:
        raise ConfigError(
            f"limits.max_requests={new.limits.max_requests}: the server was started with {most}; while it runs "
            "this can be lowered, and raised to that again"
        )


def refuse_other_text(old: ModelSpec, old_path: Path, new: ModelSpec, new_path: Path, max_len: int) -> None:
    """Raise ConfigError for a checkpoint with other tokens, or one too small for the requests that were accepted.

    max_len: the longest sequence of accepted requests."""
    said = f"model.path={new_path}"
    if new.vocab_size != old.vocab_size or new.use != old.use or new.max_len < max_len:
        raise ConfigError(
            f"{said}: it has {new.vocab_size} tokens, contexts of {new.max_len} and serves {new.use.kind}; to "
            f"replace the present model it needs {old.vocab_size}, at least {max_len} and {old.use.kind}"
        )
    if old_path != new_path and _tokenizer(old_path) != _tokenizer(new_path):
        raise ConfigError(f"{said}: its {TOKENIZER_FILE} differs, so the streams' tokens would mean other text")


def _tokenizer(path: Path) -> bytes:
    file = path / TOKENIZER_FILE
    return file.read_bytes() if file.is_file() else b""


def _shown(value: Any) -> str:
    return msgspec.json.encode(value).decode()
