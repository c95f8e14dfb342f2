"""The sections of callboard.toml: the core's keys, each with its type, its range, its default and its one-line help.

Owns: the core's tables, and how a running server changes each setting.
Does not know: where values come from, devices, checkpoints; plugins decode their own option tables.
Folders bring further keys to the sections that are ``extended``.
"""

from typing import Annotated, Any, ClassVar, Literal

import msgspec

from engine.settings.additions import extended
from engine.settings.section import Changed, Section, key


# fmt: off
@extended("model")
class ModelSection(Section, frozen=True):
    """[model]: which checkpoint to serve and how to read it."""

    path: Annotated[str, key(
        "Directory of a Hugging Face checkpoint or a GGUF file (relative to this file), a hub id, or 'demo'",
        changed="executors", is_place=True
    )] = "demo"
    revision: Annotated[str, key(
        "Hub revision: branch, tag or commit; empty for the default branch", changed="executors", is_place=True
    )] = ""
    name: Annotated[str, key(
        "Model name in the API; empty for the last part of the path, callboard-demo for 'demo'"
    )] = ""
    tokenizer: Annotated[str, key(
        "Directory of the tokenizer; empty for the checkpoint's own, 'none' takes and returns token ids only",
        is_place=True
    )] = ""
    load_format: Annotated[Literal["safetensors", "dummy"], key(
        "'dummy' draws seeded random weights from config.json alone", changed="executors"
    )] = "safetensors"
    dtype: Annotated[Literal["auto", "float32", "bfloat16", "float16"], key(
        "'auto' is float32 on CPU and the checkpoint's own type on a GPU", changed="executors"
    )] = "auto"
    quantization: Annotated[str, key(
        "Type that weights are rounded to at load, those of the LM head less or not: 'auto' is 'fp8' for a checkpoint "
        "in float8 whose elements a Hopper GPU multiplies, 'mxfp4' for one with experts in MXFP4 on a GPU, else "
        "'none', which loses nothing; 'float16', 'bfloat16' and 'int8' on a CPU, 'int8', 'fp8' and 'int4' on a GPU, "
        "or a type of a plugin", changed="executors"
    )] = "auto"
    experts: Annotated[Literal["cut", "divided", "exchanged"], key(
        "How ranks share a mixture of experts: each holds a part of every expert ('cut'), or whole ones ('divided'); "
        "'exchanged' is that, and a rank sends only the results that its experts have", changed="executors"
    )] = "cut"
    numerics: Annotated[Literal["fast", "invariant"], key(
        "'invariant': a request gets the same tokens and log probabilities, to the bit, whatever else runs; "
        "checked at start; on GPUs only parts of it were tried", changed="executors"
    )] = "fast"
    max_model_len: Annotated[int, key(
        "Longest prompt plus output in tokens; 0 for the model's trained length, or what of it fits the memory", ge=0
    )] = 0


class DeviceSection(Section, frozen=True):
    """[device]: where the model runs."""

    kind: Annotated[Literal["auto", "cpu", "cuda"], key("'auto' uses a GPU if there is one")] = "auto"
    tensor_parallel: Annotated[int, key(
        "Ranks that share the model, each on a GPU of its own or on the CPU", ge=1, le=64
    )] = 1
    threads: Annotated[int, key(
        "CPU threads for the model; 0 for the fastest number, measured at start and again when steps become slow",
        ge=0, changed="executors"
    )] = 0
    seed: Annotated[int, key("Seeds dummy weights and requests without a seed; 0 draws one", ge=0)] = 0


@extended("kv")
class KVSection(Section, frozen=True):
    """[kv]: the paged KV cache."""

    changed: ClassVar[Changed] = "executors"

    page_size: Annotated[Literal[1, 4, 8, 16, 32, 64, 128, 256], key("Tokens per page")] = 16
    dtype: Annotated[Literal["auto", "float32", "bfloat16", "float16", "int8", "fp8_e4m3"], key(
        "Type of the keys and values in pages: 'auto' is the model's own type, int8 (for a CPU) and fp8_e4m3 (for a "
        "GPU) use the least memory"
    )] = "auto"
    num_pages: Annotated[int, key("Pages in the pool; 0 sizes it from memory_fraction", ge=0)] = 0
    layout: Annotated[Literal["layer_first", "page_first"], key(
        "'page_first' makes each page one block over all layers, for cheaper copies between tiers"
    )] = "layer_first"
    memory_fraction: Annotated[float, key(
        "Fraction of free memory for the pool, on CPU at most 4 GiB; 0 for 0.85 on CPU, 0.9 on a GPU", ge=0, le=0.98
    )] = 0.0

    def kept_as(self, dtype: str) -> str:
        """Return the type of the pages, if it differs from ``dtype``, the model's; else ''.

        An empty ``dtype`` stands for an unknown floating type, which may be the same as that of the pages."""
        same = self.dtype in ("auto", dtype) or (not dtype and self.dtype in ("float32", "bfloat16", "float16"))
        return "" if same else self.dtype


@extended("scheduler")
class SchedulerSection(Section, frozen=True):
    """[scheduler]: the composition of a step."""

    changed: ClassVar[Changed] = "executors"

    max_running: Annotated[int, key(
        "Most sequences in a batch; 0 for 64 on CPU, 256 or 512 on a GPU", ge=0, le=4096
    )] = 0
    max_step_tokens: Annotated[int, key(
        "Token budget of a step: decodes first, prefill chunks after; 0 for 2048 on CPU, 8192 on a GPU", ge=0
    )] = 0
    prefill_chunk: Annotated[int, key(
        "Most prompt tokens of one request in a step with decodes; 0 for 512 on CPU, 2048 on a GPU",
        ge=0, changed="live"
    )] = 0
    itl_target_ms: Annotated[float, key(
        "Target time between tokens of running requests, for which prefills are cut; 0 for no target",
        ge=0, changed="live"
    )] = 0.0
    overlap_depth: Annotated[int, key(
        "Steps in flight; 2 plans a step while the one before it runs", ge=1, le=2, changed="live"
    )] = 2


@extended("placement")
class PlacementSection(Section, frozen=True):
    """[placement]: where executors, tokenizers and HTTP run, and what happens when one is lost."""

    executor: Annotated[Literal["auto", "inline", "process"], key(
        "'inline': a thread of the server; 'process': a process per rank, restarted if it dies or hangs; 'auto' "
        "is 'process' on a GPU"
    )] = "auto"
    tokenizers: Annotated[int, key(
        "Tokenizer processes, restarted if they die or hang; 0 for one tokenizer on the server's own event loop",
        ge=0, le=64
    )] = 0
    ingress: Annotated[Literal["inline", "process"], key(
        "'inline': HTTP and ingress on the engine's own event loop; 'process': in a process, restarted if it dies "
        "or hangs"
    )] = "inline"
    link: Annotated[str, key(
        "How processes connect: 'unix', 'unix:DIRECTORY' for sockets below it, or 'tcp://HOST:PORT' (port 0: "
        "any), encrypted and authenticated", is_place=True, pattern=r"^(unix|unix:.+|tcp://[^/]+:[0-9]+)$"
    )] = "unix"
    step_timeout_s: Annotated[float, key(
        "An executor whose step takes longer than this is restarted; 0 for never", ge=0, changed="executors"
    )] = 120.0
    silence_timeout_s: Annotated[float, key(
        "A process that has sent no message for longer than this is restarted", gt=0
    )] = 10.0
    max_restarts: Annotated[int, key(
        "Restarts within five minutes; one more ends the engine with an error. With 2 or more, a request that "
        "repeatedly crashes the executors is identified and failed instead", ge=0
    )] = 3


@extended("graphs")
class GraphsSection(Section, frozen=True):
    """[graphs]: steps that are captured once and replayed without running the model's Python."""

    changed: ClassVar[Changed] = "executors"

    mode: Annotated[Literal["auto", "off", "decode", "breakable", "compiled"], key(
        "'decode' captures decode steps alone, 'breakable' also the model between attention calls for steps with "
        "prefill, 'compiled' compiles that too; 'auto' is breakable on a GPU, off on CPU"
    )] = "auto"


@extended("plugins")
class PluginsSection(Section, frozen=True):
    """[plugins]: the implementation behind each hook, and the option tables of plugins."""

    options: Annotated[dict[str, dict[str, Any]], key(
        "Option table per plugin, e.g. [plugins.options.'attention.torch']", changed="executors", is_place=True
    )] = {}


@extended("server")
class ServerSection(Section, frozen=True):
    """[server]: the HTTP frontend."""

    host: Annotated[str, key("Address to listen on; anything but loopback needs keys")] = "127.0.0.1"
    port: Annotated[int, key("TCP port, 0 for any free one", ge=0, le=65535)] = 8000
    allowed_template_variables: Annotated[tuple[str, ...], key(
        "Names that clients may set in a request's chat_template_kwargs"
    )] = ("enable_thinking", "thinking", "preserve_thinking", "reasoning_effort", "date_string")
    api_key: Annotated[str | list[str], key(
        "Bearer token that clients must send, or a list of them; empty for none"
    )] = ""
    key_file: Annotated[str, key(
        "TOML file of more keys, [clients] and [operators] with lines of name = 'key', read again when it changes",
        is_place=True
    )] = ""
    operator_key: Annotated[str, key(
        "Key of an operator, for routes that change or show the whole server, besides [operators] in key_file. "
        "Without any key, of operators or clients, it is the token that the server writes below its cache folder"
    )] = ""
    tls_cert: Annotated[str, key(
        "PEM file of the server's certificate and its chain; the server then serves HTTPS only. This file and the next "
        "two are read again when they change", is_place=True
    )] = ""
    tls_key: Annotated[str, key("PEM file of the certificate's private key, without a password", is_place=True)] = ""
    tls_client_ca: Annotated[str, key(
        "PEM file of the authorities that must sign the certificates of clients and probes; empty: none are required",
        is_place=True
    )] = ""
    max_connections: Annotated[int, key("Most open connections", ge=1)] = 2048
    max_connections_per_address: Annotated[int, key(
        "Most open connections of one address (of all clients, if they connect through a proxy); 0 for a quarter of "
        "max_connections", ge=0
    )] = 0
    max_body_bytes: Annotated[int, key("Largest request body", ge=1024)] = 4 << 20
    client_timeout_s: Annotated[float, key(
        "Longest time for a client to send its first byte and headers, to send a body (one second more for each "
        "64 KiB), or to read nothing of a response", gt=0
    )] = 15.0
    ping_after_s: Annotated[float, key(
        "An idle stream sends a ping after this time, the first one with its status 200; 0 for never",
        ge=0,
    )] = 15.0
    drain_timeout_s: Annotated[float, key("After SIGTERM, how long running requests may go on", ge=0)] = 30.0
    shared_cache: Annotated[bool, key(
        "Whether clients with different keys share cached prefixes; timing then reveals other clients' prompts"
    )] = False
    cors_origins: Annotated[list[str], key(
        "Origins of web pages that may call the server, e.g. ['https://chat.example.org']; '*' for any, if keys are set"
    )] = []
    allowed_hosts: Annotated[list[str], key(
        "Public names by which clients without a key may call the server, e.g. ['llm.example.org'] behind a "
        "proxy; '*' for any"
    )] = []


    @property
    def scheme(self) -> str:
        """Scheme of the server's address."""
        return "https" if self.tls_cert else "http"

    @property
    def without_tls(self) -> "ServerSection":
        """These settings for a server behind a router, which calls it by plain HTTP."""
        return msgspec.structs.replace(self, tls_cert="", tls_key="", tls_client_ca="")

    @property
    def needs_key(self) -> bool:
        """Whether clients must send a key."""
        return any(self.api_key) or bool(self.key_file)


class LimitsSection(Section, frozen=True):
    """[limits]: bounds on open requests; beyond them clients get 429 with Retry-After."""

    changed: ClassVar[Changed] = "live"

    max_requests: Annotated[int, key("Most requests open at once, running or waiting", ge=1, le=65536)] = 512
    max_queued_tokens: Annotated[int, key(
        "Most prompt tokens of all open requests (estimated from text and pixels)", ge=1
    )] = 4_000_000
    max_requests_per_client: Annotated[int, key(
        "Most open requests of one client, by API key, or by address without one; 0 for no such limit", ge=0
    )] = 0
    requests_per_minute: Annotated[int, key(
        "Most requests that one client may begin in a minute; 0 for no such limit", ge=0
    )] = 0
    tokens_per_minute: Annotated[int, key(
        "Most tokens of one client in a minute, prompts and output; 0 for no such limit", ge=0
    )] = 0
    first_token_timeout_s: Annotated[float, key(
        "A request without a token after this time gets 503 with Retry-After; 0 for never", ge=0
    )] = 0.0
    request_timeout_s: Annotated[float, key("Longest total time of a request", gt=0)] = 600.0


@extended("storage")
class StorageSection(Section, frozen=True):
    """[storage]: files that the server writes about its clients' requests; none unless a folder is named."""

    folder: Annotated[str, key(
        "Folder of files, batches, stored responses, the journal and recordings; empty writes nothing",
        is_place=True
    )] = ""


# fmt: on
