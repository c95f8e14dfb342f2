"""The configuration tree: what callboard.toml may say, with every default and its one-line doc.

Owns: names, types, ranges, defaults, where values come from (file, then CALLBOARD_* environment, then --set).
Does not know: devices, checkpoints, plugins; plugin options are opaque tables that the plugin decodes itself.
"""

import math
import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from engine.errors import ConfigError
from engine.toml_lines import line_of

ENVIRONMENT_PREFIX = "CALLBOARD_"
MAX_FILE_BYTES = 1 << 20
UNKNOWN_FIELD = re.compile("unknown field `(.*)`")  # as msgspec says it
MIN_CLUSTER_KEY = 32


# fmt: off: one line per key
class Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A TOML table.  Unknown keys are errors."""


class ModelSection(Section, frozen=True):
    """[model]: which checkpoint to serve and how to read it."""

    path: Annotated[
        str, Meta(description="Directory of a Hugging Face checkpoint (relative to this file), a hub id, or 'demo'")
    ] = "demo"
    revision: Annotated[str, Meta(description="Hub revision: branch, tag or commit; empty for the default branch")] = ""
    name: Annotated[str, Meta(description="Model name in the API; empty for the last part of the path")] = ""
    tokenizer: Annotated[
        str,
        Meta(
            description="Directory of the tokenizer; empty for the checkpoint's own, 'none' to take and give token ids only"
        ),
    ] = ""
    load_format: Annotated[
        Literal["safetensors", "dummy"], Meta(description="'dummy' draws seeded random weights from config.json alone")
    ] = "safetensors"
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        Meta(description="'auto' is float32 on CPU and the checkpoint's own type on a GPU"),
    ] = "auto"
    tool_format: Annotated[
        Literal["auto", "hermes", "llama3"],
        Meta(description="How the model writes function calls; 'auto' goes by its chat template"),
    ] = "auto"
    thinks: Annotated[
        Literal["auto", "yes", "no"],
        Meta(description="Whether <think> text is told apart from answers; 'auto' goes by the chat template"),
    ] = "auto"
    max_len: Annotated[
        int, Meta(ge=0, description="Longest prompt plus output in tokens; 0 for what the model was trained for")
    ] = 0


class DeviceSection(Section, frozen=True):
    """[device]: where the model runs."""

    kind: Annotated[Literal["auto", "cpu", "cuda"], Meta(description="'auto' takes a GPU where there is one")] = "auto"
    tensor_parallel: Annotated[
        int, Meta(ge=1, le=64, description="Ranks that share the model, each on a GPU of its own or on the CPU")
    ] = 1
    threads: Annotated[
        int, Meta(ge=0, description="CPU threads for the model; 0 for all cores, or one if the model is small")
    ] = 0
    seed: Annotated[
        int, Meta(ge=0, description="Seeds dummy weights and requests that bring no seed of their own; 0 draws one")
    ] = 0


class KVSection(Section, frozen=True):
    """[kv]: the paged KV cache."""

    page_size: Annotated[Literal[1, 4, 8, 16, 32, 64, 128, 256], Meta(description="Tokens per page")] = 16
    num_pages: Annotated[int, Meta(ge=0, description="Pages in the pool; 0 sizes it from memory_fraction")] = 0
    num_host_pages: Annotated[
        int, Meta(ge=0, description="Pages of host memory that evicted pages move to and come back from; 0 for none")
    ] = 0
    memory_fraction: Annotated[
        float, Meta(gt=0, le=0.98, description="Share of free memory for the pool, on CPU at most 4 GiB")
    ] = 0.85


class SchedulerSection(Section, frozen=True):
    """[scheduler]: what runs in a step."""

    max_running: Annotated[int, Meta(ge=1, le=4096, description="Most sequences in a batch")] = 64
    max_step_tokens: Annotated[
        int, Meta(ge=1, description="Token budget of a step: decodes first, prefill chunks after")
    ] = 2048
    prefill_chunk: Annotated[int, Meta(ge=1, description="Most prompt tokens of one request in a step")] = 512
    prefill_order: Annotated[
        Literal["round_robin", "fcfs"],
        Meta(description="'round_robin': prompts take turns, a chunk each; 'fcfs': the oldest is finished first"),
    ] = "round_robin"
    itl_target_ms: Annotated[
        float,
        Meta(ge=0, description="Prefills are cut so that running requests get a token this often; 0 for no target"),
    ] = 0.0
    overlap_depth: Annotated[
        int, Meta(ge=1, le=2, description="Steps in flight; 2 plans a step while the one before it runs")
    ] = 2


class PlacementSection(Section, frozen=True):
    """[placement]: where executors, tokenizers and HTTP run, and what happens when one is lost."""

    executor: Annotated[
        Literal["inline", "process"],
        Meta(
            description="'inline': a thread of the server; 'process': a process per rank, restarted if it dies or hangs"
        ),
    ] = "inline"
    tokenizers: Annotated[
        int,
        Meta(
            ge=0,
            le=64,
            description="Tokenizer processes, restarted likewise; 0 for one tokenizer on the server's own event loop",
        ),
    ] = 0
    ingress: Annotated[
        Literal["inline", "process"],
        Meta(
            description="'inline': HTTP and ingress on the engine's own event loop; 'process': in a process, restarted likewise"
        ),
    ] = "inline"
    link: Annotated[
        str,
        Meta(
            pattern=r"^(unix|unix:.+|tcp://[^/]+:[0-9]+)$",
            description="How processes are reached: 'unix', 'unix:DIRECTORY' for sockets below it, or 'tcp://HOST:PORT' "
            "(port 0: any), encrypted and authenticated",
        ),
    ] = "unix"
    cluster_key: Annotated[
        str,
        Meta(
            description="Secret of at least 32 characters that ranks on other machines prove to have; best set as "
            "CALLBOARD_PLACEMENT__CLUSTER_KEY; never printed"
        ),
    ] = ""
    join_timeout_s: Annotated[
        float, Meta(gt=0, description="How long the ranks on other machines may take to join, and to find the server")
    ] = 300.0
    step_timeout_s: Annotated[
        float, Meta(ge=0, description="An executor that takes longer for a step hangs and is restarted; 0 for never")
    ] = 120.0
    silence_timeout_s: Annotated[
        float, Meta(gt=0, description="So does a process that has not answered at all for this long")
    ] = 10.0
    max_restarts: Annotated[
        int,
        Meta(
            ge=0,
            description="Restarts within restart_window_s; one more ends the engine with an error. From 2 on, a request that ends executors is found and ends instead",
        ),
    ] = 3
    restart_window_s: Annotated[float, Meta(gt=0, description="Seconds over which restarts are counted")] = 300.0


class GraphsSection(Section, frozen=True):
    """[graphs]: steps that are captured once and replayed, without the model's Python."""

    mode: Annotated[
        Literal["auto", "off", "decode", "breakable", "compiled"],
        Meta(
            description="'decode' captures decode steps alone, 'breakable' also the model between attention calls for steps "
            "with prefill, 'compiled' compiles that too; 'auto' is breakable on a GPU, off on CPU"
        ),
    ] = "auto"
    max_rows: Annotated[int, Meta(ge=1, description="Largest captured decode batch; larger ones run as they are")] = 512
    max_tokens: Annotated[
        int, Meta(ge=1, description="Largest captured step with prefill, in tokens; larger ones run as they are")
    ] = 4096


class AttentionNames(Section, frozen=True):
    """Attention backends by what a sequence does in a step: reads a part of its prompt, or writes its next token."""

    prefill: str = "auto"
    decode: str = "auto"


class PluginsSection(Section, frozen=True):
    """[plugins]: which implementation stands behind each hook, and their own option tables."""

    attention: Annotated[
        str | AttentionNames,
        Meta(description="Attention backend, or { prefill = ..., decode = ... }; 'auto' picks by device and model"),
    ] = "auto"
    eviction: Annotated[
        str, Meta(description="What leaves the prefix cache first: lru, lfu, fifo, slru, priority; 'auto' is lru")
    ] = "auto"
    policy: Annotated[
        str, Meta(description="Who of those that wait runs first: priority, fcfs, lpm; 'auto' is priority")
    ] = "auto"
    grammar: Annotated[str, Meta(description="What makes output follow a schema or grammar; 'auto' is llguidance")] = (
        "auto"
    )
    comm: Annotated[str, Meta(description="Communication library between ranks, 'auto' picks by world size")] = "auto"
    observers: Annotated[
        list[str],
        Meta(description="Who is told of finished requests and cached pages: any number of names, e.g. ['log']"),
    ] = []
    options: Annotated[
        dict[str, dict[str, Any]], Meta(description="Option table per plugin, e.g. [plugins.options.'attention.torch']")
    ] = {}

    def by_kind(self) -> dict[str, str | AttentionNames]:
        """Plugin kind -> the name wanted for it, of the kinds of which there is one; attention may have two."""
        names = ("attention", "eviction", "policy", "comm", "grammar")
        return {kind: getattr(self, kind) for kind in names}


class ServerSection(Section, frozen=True):
    """[server]: the HTTP front."""

    host: Annotated[str, Meta(description="Address to listen on; anything but loopback needs an api_key")] = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535, description="TCP port, 0 for any free one")] = 8000
    chat_template_kwargs: Annotated[
        tuple[str, ...], Meta(description="What clients may tell the model's chat template, in chat_template_kwargs")
    ] = ("enable_thinking", "thinking", "preserve_thinking", "reasoning_effort", "date_string")
    api_key: Annotated[
        str | list[str], Meta(description="Bearer token that clients must send, or a list of them; empty for none")
    ] = ""
    max_connections: Annotated[int, Meta(ge=1, description="Most open connections")] = 2048
    max_body_bytes: Annotated[int, Meta(ge=1024, description="Largest request body")] = 4 << 20
    header_timeout_s: Annotated[
        float, Meta(gt=0, description="From a request's first byte to the end of its headers")
    ] = 10.0
    body_timeout_s: Annotated[
        float, Meta(gt=0, description="For reading a request's body, and a second more for each 64 KiB of it")
    ] = 15.0
    keepalive_timeout_s: Annotated[float, Meta(gt=0, description="Idle time of a kept-alive connection")] = 75.0
    write_timeout_s: Annotated[
        float, Meta(gt=0, description="A client that reads nothing for this long is cut off")
    ] = 10.0
    drain_timeout_s: Annotated[float, Meta(ge=0, description="After SIGTERM, how long running requests may go on")] = (
        30.0
    )
    shared_cache: Annotated[
        bool,
        Meta(
            description="Whether clients with different keys share cached prefixes; timing then tells of others' prompts"
        ),
    ] = False
    cors_origins: Annotated[
        list[str],
        Meta(description="Web pages that browsers may call from, e.g. ['https://chat.example.org']; '*' for any"),
    ] = []
    vllm_metric_names: Annotated[
        bool,
        Meta(description="/metrics also gives what dashboards and autoscalers made for vLLM look for, as 'vllm:...'"),
    ] = False
    traces: Annotated[
        str, Meta(description="Where OpenTelemetry spans go, e.g. 'http://127.0.0.1:4318/v1/traces'; empty for none")
    ] = ""


class LimitsSection(Section, frozen=True):
    """[limits]: what is admitted; beyond it clients get 429 with Retry-After."""

    max_requests: Annotated[int, Meta(ge=1, le=65536, description="Most requests open at once, running or waiting")] = (
        512
    )
    max_queued_tokens: Annotated[
        int, Meta(ge=1, description="Most prompt tokens of all open requests (estimated from text)")
    ] = 4_000_000
    max_choices: Annotated[
        int, Meta(ge=1, le=128, description="Largest n, and most prompts in one body, of a request")
    ] = 128
    max_requests_per_client: Annotated[
        int,
        Meta(
            ge=0, description="Most of them that are one client's, by API key or else by address; 0 for no such limit"
        ),
    ] = 0
    first_token_timeout_s: Annotated[
        float,
        Meta(ge=0, description="A request that has had no token for so long gets 503 with Retry-After; 0 for never"),
    ] = 0.0
    request_timeout_s: Annotated[float, Meta(gt=0, description="Longest time a request may take in all")] = 600.0


class Config(Section, frozen=True):
    """The whole of callboard.toml."""

    model: ModelSection = ModelSection()
    device: DeviceSection = DeviceSection()
    kv: KVSection = KVSection()
    scheduler: SchedulerSection = SchedulerSection()
    graphs: GraphsSection = GraphsSection()
    placement: PlacementSection = PlacementSection()
    plugins: PluginsSection = PluginsSection()
    server: ServerSection = ServerSection()
    limits: LimitsSection = LimitsSection()

    def chosen_plugins(self) -> dict[str, str | AttentionNames]:
        """Plugin kind -> the name wanted for it, 'auto' where the kind's own default will do."""
        chosen = self.plugins.by_kind()
        if chosen["comm"] == "auto" and self.device.tensor_parallel > 1:
            chosen["comm"] = "torch"  # the default is for one rank
        return chosen


# fmt: on


def load_config(
    path: Path | None = None,
    overrides: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> Config:
    """Read ``path``, then lay CALLBOARD_SECTION__KEY variables and ``section.key=value`` overrides over it.

    A relative ``model.path`` from the file that exists beside the file is resolved against it.
    Raises ConfigError naming the file or origin, the key, what was seen and what is allowed.
    """
    table: dict[str, Any] = {}
    if path is not None:
        text = _read_text(path)
        table = _parse(path, text)
        _decode(table, str(path), text)  # so that an error names the file, not an override
        _anchor_model_path(table, path.parent)
    environment = os.environ if environment is None else environment
    for name in sorted(environment):
        if name.startswith(ENVIRONMENT_PREFIX) and "__" in name:
            key = name[len(ENVIRONMENT_PREFIX) :].lower().replace("__", ".")
            _lay_over(table, key, environment[name], origin=name)
    for override in overrides:
        key, separator, value = override.partition("=")
        if not separator:
            raise ConfigError(f"--set {override}: expected section.key=value, for example kv.page_size=64")
        _lay_over(table, key.strip(), value.strip(), origin=f"--set {override}")
    config = _decode(table, str(path) if path else "configuration")
    _check(config)
    return config


def build_config(base: Config, tables: Mapping[str, Mapping[str, Any]]) -> Config:
    """``base`` with the keys of ``tables`` (section -> key -> value) laid over it.  Raises ConfigError."""
    merged: dict[str, Any] = msgspec.to_builtins(base)
    for section, keys in tables.items():
        merged[section] = {**merged.get(section, {}), **keys} if isinstance(keys, Mapping) else keys
    config = _decode(merged, "configuration")
    _check(config)
    return config


def without_cluster_key(config: Config) -> Config:
    """``config`` as processes are told it that only need to know what to run."""
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


def _parse(path: Path, text: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from None


def _decode(table: dict[str, Any], origin: str, text: str = "") -> Config:
    """text: of the file that the table is, so that an error can name the line."""
    try:
        return msgspec.convert(table, Config, strict=True)
    except msgspec.ValidationError as error:
        reason, _, where = str(error).partition(" - at `$")
        key = where.rstrip("`").lstrip(".")
        hint, wrong = "", [one for one in key.partition("[")[0].split(".") if one]
        if unknown := UNKNOWN_FIELD.search(reason):
            hint = _allowed_keys(key)
            wrong.append(unknown[1])
        if line := line_of(text, tuple(wrong)):
            origin = f"{origin}:{line}"
        raise ConfigError(f"{origin}: {key + ': ' if key else ''}{reason}{hint}") from None


def _allowed_keys(section: str) -> str:
    known: type[Any] | None = Config
    if section:
        known = {**Config.__annotations__, "plugins.attention": AttentionNames}.get(section)
    return f"; known keys: {', '.join(known.__struct_fields__)}" if known is not None else ""


def _lay_over(table: dict[str, Any], key: str, text: str, origin: str) -> None:
    """Set one dotted key.  The value is read as TOML; what is not TOML is a plain string."""
    section, dot, name = key.partition(".")
    if not dot or section not in Config.__struct_fields__:
        raise ConfigError(
            f"{origin}: unknown section; expected section.key with a section of: {', '.join(Config.__struct_fields__)}"
        )
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text
    changed = {**table, section: {**table.get(section, {}), name: value}}
    _decode(changed, origin)
    table.update(changed)


def _anchor_model_path(table: dict[str, Any], folder: Path) -> None:
    model = table.get("model", {})
    beside = folder / model.get("path", "")
    if model.get("path") and beside.is_dir():
        model["path"] = str(beside.resolve())


def _check(config: Config) -> None:
    """Settings that contradict each other, and times without end."""
    for section in config.__struct_fields__:
        for key, value in msgspec.structs.asdict(getattr(config, section)).items():
            if isinstance(value, float) and not math.isfinite(value):
                raise ConfigError(f"{section}.{key}={value}: expected a finite number")
    if config.scheduler.max_step_tokens < config.scheduler.max_running:
        raise ConfigError(
            f"scheduler.max_step_tokens={config.scheduler.max_step_tokens}: smaller than scheduler.max_running="
            f"{config.scheduler.max_running}, so a full decode batch would not fit a step; raise it or lower max_running"
        )
    if 0 < len(config.placement.cluster_key) < MIN_CLUSTER_KEY:
        raise ConfigError(
            f"placement.cluster_key: {len(config.placement.cluster_key)} characters, expected at least "
            f"{MIN_CLUSTER_KEY}: openssl rand -hex 32 makes some"
        )
    loopback = config.server.host in ("127.0.0.1", "::1", "localhost")
    if not loopback and not config.server.api_key:
        raise ConfigError(f"server.host={config.server.host}: listening beyond loopback needs server.api_key")


def json_schema() -> dict[str, Any]:
    """JSON Schema of the configuration file."""
    return msgspec.json.schema(Config)


def render_toml(config: Config) -> str:
    """The effective configuration as TOML, every key with its one-line doc, and without the cluster's secret."""
    config = without_cluster_key(config)
    lines: list[str] = []
    for section_name in config.__struct_fields__:
        section = getattr(config, section_name)
        lines.append(f"[{section_name}]")
        for field in msgspec.inspect.type_info(type(section)).fields:  # type: ignore[attr-defined]
            value = getattr(section, field.name)
            doc = (field.type.extra_json_schema or {}).get("description", "")
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
