"""The configuration: all sections of callboard.toml, read, checked and written.

Owns: where values come from (file, then CALLBOARD_* environment, then --set), what errors say and which line they name,
the names of old keys.  Does not know: what the keys mean; ``sections.py`` has them.
"""

import math
import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, TypeVar

import msgspec

from engine.settings.additions import additions, arrays, with_arrays, with_sections
from engine.settings.attention_names import AttentionNames
from engine.settings.section import Section
from engine.settings.sections import (
    DeviceSection,
    GraphsSection,
    KVSection,
    LimitsSection,
    ModelSection,
    PlacementSection,
    PluginsSection,
    SchedulerSection,
    ServerSection,
    StorageSection,
)
from engine.types.errors import ConfigError

ENVIRONMENT_PREFIX = "CALLBOARD_"
MAX_FILE_BYTES = 1 << 20
UNKNOWN_FIELD = re.compile("unknown field `(.*)`")  # msgspec's own words
PATTERN = "Expected `str` matching regex"  # msgspec's own words
MIN_KEY = 16  # characters of a key of clients or operators
SECRETS = frozenset({"api_key", "operator_key", "cluster_key"})
# Keys of earlier versions -> the setting that replaced each; '' where there is nothing left to choose.
OLD_KEYS = {
    "model.thinks": "plugins.reasoning_parser",
    "model.reasoning": "plugins.reasoning_parser",
    "model.tool_format": "plugins.tool_parser",
    "model.max_len": "model.max_model_len",
    "scheduler.prefill_order": "",
    "placement.restart_window_s": "",
    "server.chat_template_kwargs": "server.allowed_template_variables",
    "server.header_timeout_s": "server.client_timeout_s",
    "server.body_timeout_s": "server.client_timeout_s",
    "server.write_timeout_s": "server.client_timeout_s",
    "server.keepalive_timeout_s": "",
    "server.vllm_metric_names": "",
    "limits.max_choices": "",
    "storage.max_file_mb": "",
    "graphs.autotune": "",
    "kv.store_buffer_mb": "",
}
# A bare or quoted key, or several with dots between them.
KEY = r"""(?:[A-Za-z0-9_-]+|"[^"]*"|'[^']*')"""
KEYS = rf"{KEY}(?:\s*\.\s*{KEY})*"
HEADER = re.compile(rf"\s*\[\[?\s*({KEYS})\s*\]")
ASSIGNMENT = re.compile(rf"\s*({KEYS})\s*=")
S = TypeVar("S", bound=Section)


@with_sections
class Config(Section, frozen=True):
    """The whole of callboard.toml: the core's sections, and those that folders bring.

    array: the array of tables of a configuration that a folder's ``Array`` reads; '' for one engine's."""

    array: ClassVar[str] = ""

    model: ModelSection = ModelSection()
    device: DeviceSection = DeviceSection()
    kv: KVSection = KVSection()
    scheduler: SchedulerSection = SchedulerSection()
    graphs: GraphsSection = GraphsSection()
    placement: PlacementSection = PlacementSection()
    plugins: PluginsSection = PluginsSection()
    server: ServerSection = ServerSection()
    limits: LimitsSection = LimitsSection()
    storage: StorageSection = StorageSection()


class WrittenConfig(NamedTuple):
    """A configuration as it is written.

    origin: what errors call it.  folder: that of its file.  table: section or array -> what it has.  text: '' for none.
    """

    origin: str
    folder: Path | None
    text: str
    table: dict[str, Any]

    def check(self, table: dict[str, Any], kind: type[S], text: str, under: tuple[str, ...] = ()) -> S:
        """Return a table as what it is.

        Raises ConfigError that names the table's place, and the line of ``text``, which has as many as the file."""
        return _decode(table, kind, self.origin, text, under)

    def read(
        self, table: dict[str, Any], overrides: Sequence[str], environment: Mapping[str, str] | None, part: str = ""
    ) -> Config:
        """Return what a table comes to with the environment and overrides.  Raises ConfigError that names ``part``."""
        if self.folder is not None:
            _anchor_model_path(table, self.folder)
        return _laid_over(table, overrides, os.environ if environment is None else environment, self.origin + part)


def load_config(
    path: Path | None = None,
    overrides: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    text: str | None = None,
) -> Config:
    """Read ``path``, then lay CALLBOARD_SECTION__KEY variables and ``section.key=value`` overrides over it.

    text: what to read instead of the file.  A relative ``model.path`` is resolved against the file, if it is beside it.
    Raises ConfigError naming the file or origin, the key, what was seen and what is allowed.
    """
    written = read_written(path, text)
    for array in arrays():
        if array.table in written.table:
            raise ConfigError(f"{written.origin}: it has [[{array.table}]]; {array.advice}")
    written.check(written.table, Config, written.text)  # so that an error names the file, not an override
    return written.read(written.table, overrides, environment)


def read_written(path: Path | None, text: str | None = None) -> WrittenConfig:
    """Read a file, or ``text`` in its place.  Raises ConfigError for what is no TOML."""
    origin = "configuration" if path is None or text is not None else str(path)
    if text is None:
        text = "" if path is None else _read_text(path)
    return WrittenConfig(origin, None if path is None else path.parent, text, _parse(origin, text))


@dataclass(frozen=True, slots=True)
class ConfigSource:
    """The source of a configuration, from which it can be read again.

    path: None for no file.  overrides: as in ``load_config``."""

    path: Path | None = None
    overrides: tuple[str, ...] = ()

    def load(self, text: str | None = None) -> Config:
        """Read it all again, or ``text`` in the place of the file.  Raises ConfigError as ``load_config`` does."""
        return load_config(self.path, self.overrides, text=text)


def _laid_over(table: dict[str, Any], overrides: Sequence[str], environment: Mapping[str, str], where: str) -> Config:
    """The configuration that a table comes to with the environment and overrides.  Raises ConfigError."""
    for name in sorted(environment):
        if name.startswith(ENVIRONMENT_PREFIX) and "__" in name:
            key = name[len(ENVIRONMENT_PREFIX) :].lower().replace("__", ".")
            _lay_over(table, key, environment[name], origin=name)
    for override in overrides:
        key, separator, value = override.partition("=")
        if not separator:
            raise ConfigError(f"--set {override}: expected section.key=value, for example kv.page_size=64")
        _lay_over(table, key.strip(), value.strip(), origin=f"--set {override}")
    config = _decode(table, Config, where)
    _check(config)
    return config


def build_config(base: Config, tables: Mapping[str, Mapping[str, Any]]) -> Config:
    """Return ``base`` with ``tables`` (section -> key -> value) laid over it.  Raises ConfigError."""
    merged: dict[str, Any] = msgspec.to_builtins(base)
    for section, keys in tables.items():
        merged[section] = {**merged.get(section, {}), **keys} if isinstance(keys, Mapping) else keys
    config = _decode(merged, Config, "configuration")
    _check(config)
    return config


def with_overrides(base: Config, overrides: Sequence[str]) -> Config:
    """Return ``base`` with ``section.key=value`` overrides laid over it.  Raises ConfigError."""
    return _laid_over(msgspec.to_builtins(base), overrides, {}, "configuration")


def without_cluster_key(config: Config) -> Config:
    """Return ``config`` without the cluster's secret, for processes that need not prove anything."""
    return msgspec.structs.replace(config, placement=msgspec.structs.replace(config.placement, cluster_key=""))


def _read_text(path: Path) -> str:
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise ConfigError(f"{path}: larger than {MAX_FILE_BYTES} bytes; a configuration is a few kilobytes")
        return path.read_bytes().decode()
    except FileNotFoundError:
        raise ConfigError(
            f"{path}: no such file; `callboard config > {path.name}` writes one with every default"
        ) from None
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 at byte {error.start}") from None


def _parse(origin: str, text: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        what = f"{origin}: not valid TOML: {error}"
        if Path(origin).suffix not in ("", ".toml"):
            what += "; a configuration is a .toml file, a model a directory, a .gguf file or org/name"
        raise ConfigError(what) from None


def _decode(table: dict[str, Any], kind: type[S], origin: str, text: str = "", under: tuple[str, ...] = ()) -> S:
    """Check a table and return what it is.  text: the file it came from, so that an error can name the line.

    under: where the table is in the file."""
    try:
        return msgspec.convert(table, kind, strict=True)
    except msgspec.ValidationError as error:
        reason, _, where = str(error).partition(" - at `$")
        key = where.rstrip("`").lstrip(".")
        hint, wrong = "", [one for one in key.partition("[")[0].split(".") if one]
        if reason.startswith(("Invalid enum value", PATTERN)):
            # A person does not read patterns.
            reason, hint = "not of its form" if reason.startswith(PATTERN) else reason, _allowed_values(key, kind)
        if unknown := UNKNOWN_FIELD.search(reason):
            hint = _instead(f"{key}.{unknown[1]}") or _allowed_keys(key, kind)
            hint += _instead_of_section(unknown[1]) if not key else ""
            wrong.append(unknown[1])
        if line := line_of(text, (*under, *wrong)):
            origin = f"{origin}:{line}"
        key = ".".join((*under, key)) if key else "".join(f"[[{name}]]" for name in under)
        raise ConfigError(f"{origin}: {key + ': ' if key else ''}{reason}{hint}") from None


def _instead(key: str) -> str:
    if key not in OLD_KEYS:
        return ""
    return f"; it is {OLD_KEYS[key]} now" if OLD_KEYS[key] else "; it is no setting any more"


def _instead_of_section(name: str) -> str:
    """Return a hint for a name that is no section: the setting or the section that it may mean."""
    sections = {one: type(getattr(Config(), one)) for one in Config.__struct_fields__}
    if keys := [f"{one}.{name}" for one, kind in sections.items() if name in kind.__struct_fields__]:
        return f"; it is {' or '.join(keys)}"
    word = re.compile(rf"\b{re.escape(name)}\b")
    return "".join(f"; {kind.__doc__}" for kind in sections.values() if word.search(kind.__doc__ or ""))


def _allowed_keys(section: str, kind: type[Section]) -> str:
    known: dict[str, type[Section]] = {"": kind, "plugins.attention": AttentionNames}
    known |= {name: type(getattr(Config(), name)) for name in Config.__struct_fields__}
    return f"; known keys: {', '.join(known[section].__struct_fields__)}" if section in known else ""


def _allowed_values(key: str, kind: type[Section]) -> str:
    """Name the values of a key that has a few, or say what it is for."""
    section, dot, name = key.partition(".")
    owner, name = (type(getattr(Config(), section)), name) if dot else (kind, key)
    fields = msgspec.inspect.type_info(owner).fields  # type: ignore[attr-defined]
    for field in (field for field in fields if field.name == name):
        one = field.type.type if isinstance(field.type, msgspec.inspect.Metadata) else field.type
        if isinstance(one, msgspec.inspect.LiteralType):
            return f"; allowed: {', '.join(map(str, one.values))}"
        return f"; {field.type.extra_json_schema['description']}"
    return ""


def _lay_over(table: dict[str, Any], key: str, text: str, origin: str) -> None:
    """Set one dotted key.  The value is read as TOML; what is not TOML is a plain string."""
    section, dot, name = key.partition(".")
    if not dot or section not in Config.__struct_fields__:
        expected = f"expected section.key with a section of: {', '.join(Config.__struct_fields__)}"
        raise ConfigError(f"{origin}: unknown section; {expected}{_instead_of_section(section)}")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text
    changed = {**table, section: {**table.get(section, {}), name: value}}
    _decode(changed, Config, origin)
    table.update(changed)


def _anchor_model_path(table: dict[str, Any], folder: Path) -> None:
    model = table.get("model", {})
    beside = folder / model.get("path", "")
    if model.get("path") and (beside.is_dir() or (beside.suffix == ".gguf" and beside.is_file())):
        model["path"] = str(beside.resolve())


def _check(config: Config) -> None:
    """Raise ConfigError for settings that contradict each other and for numbers that are not finite."""
    for section in config.__struct_fields__:
        for key, value in msgspec.structs.asdict(getattr(config, section)).items():
            if isinstance(value, float) and not math.isfinite(value):
                raise ConfigError(f"{section}.{key}={value}: expected a finite number")
    if 0 < config.scheduler.max_step_tokens < config.scheduler.max_running:
        raise ConfigError(
            f"scheduler.max_step_tokens={config.scheduler.max_step_tokens}: smaller than scheduler.max_running="
            f"{config.scheduler.max_running}, so a full decode batch would not fit a step; "
            "raise it or lower max_running"
        )
    given = config.server.api_key
    keys = {"api_key": [given] if isinstance(given, str) else given, "operator_key": [config.server.operator_key]}
    for name, values in keys.items():
        if short := [len(value) for value in values if 0 < len(value) < MIN_KEY]:
            raise ConfigError(
                f"server.{name}: {short[0]} characters, expected at least {MIN_KEY}: openssl rand -hex 32 makes some"
            )
    if "*" in config.server.cors_origins and not config.server.needs_key:
        reason = "every page of the web could use the server; name pages, or set server.api_key or server.key_file"
        raise ConfigError(f"server.cors_origins={config.server.cors_origins}: {reason}")
    server = config.server
    if bool(server.tls_cert) != bool(server.tls_key) or (server.tls_client_ca and not server.tls_cert):
        raise ConfigError("server.tls_cert and server.tls_key go together, and server.tls_client_ca needs both")
    loopback = config.server.host in ("127.0.0.1", "::1", "localhost")
    if not loopback and not config.server.needs_key:
        needs = "listening beyond loopback needs server.api_key or server.key_file"
        raise ConfigError(f"server.host={config.server.host}: {needs}")
    for addition in additions():
        addition.of(config).check(config)


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema of the configuration file."""
    return msgspec.json.schema(with_arrays(Config))


def render_toml(config: Config) -> str:
    """Return the configuration as TOML, every key with its one-line doc, without secrets."""
    lines: list[str] = []
    for section_name in config.__struct_fields__:
        section = getattr(config, section_name)
        lines.append(f"[{section_name}]")
        for field in msgspec.inspect.type_info(type(section)).fields:  # type: ignore[attr-defined]
            value = getattr(section, field.name)
            doc = (field.type.extra_json_schema or {}).get("description", "")
            if field.name in SECRETS and value:
                value, doc = "", f"{doc} (set, not shown)"
            if isinstance(value, dict):
                lines.append(f"# {field.name}: {doc}")
                lines += [f"# {key} = {msgspec.json.encode(table).decode()}" for key, table in value.items()]
            elif isinstance(value, AttentionNames):
                names = msgspec.toml.encode(value).decode().splitlines()
                lines.append(f"{field.name} = {{ {', '.join(names)} }}  # {doc}")
            else:
                lines.append(f"{field.name} = {msgspec.toml.encode({'v': value}).decode()[4:].strip()}  # {doc}")
        lines.append("")
    return "\n".join(lines)


def line_of(text: str, key: tuple[str, ...]) -> int | None:
    """The first line that sets ``key``, or failing that the innermost table it is in; None if none does."""
    table: tuple[str, ...] = ()
    best, found = 0, None
    for number, line in enumerate(text.splitlines(), 1):
        if header := HEADER.match(line):
            here = table = _parts(header[1])
        elif assignment := ASSIGNMENT.match(line):
            here = table + _parts(assignment[1])
        else:
            continue
        depth = min(len(here), len(key))
        if here[:depth] == key[:depth] and depth > best:
            best, found = depth, number
    return found


def _parts(keys: str) -> tuple[str, ...]:
    return tuple(part.strip("\"'") for part in re.findall(KEY, keys))
