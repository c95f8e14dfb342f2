"""The sections of callboard.toml: every key, its type, its range, its default and its one-line doc.

Owns: the tables, and what it takes for a running server to change a setting.
Does not know: where values come from, devices, checkpoints; plugins decode their own option tables.
It is long because a setting and what is said of it stand together.
"""

from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

Changed = Literal["live", "executors", "fixed"]
"""How a setting changes while the server runs: at once; by executors that take the old ones' place; not at all."""


def key(description: str, *, changed: Changed | None = None, is_place: bool = False, **bounds: Any) -> Meta:
    """A setting.  changed: how it changes, where its section does not say it.  bounds: of its value, see ``Meta``.

    is_place: it names a place on the disk or the network, and only the file on the server's own disk may change it."""
    extra = {**({} if changed is None else {"changed": changed}), "is_place": is_place}
    return Meta(description=description, extra=extra, **bounds)


# fmt: off
class Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A TOML table.  Unknown keys are errors.  changed: how its settings change, unless their ``key`` says it."""

    changed: ClassVar[Changed] = "fixed"


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
        "Directory of the tokenizer; empty for the checkpoint's own, 'none' to take and give token ids only",
        is_place=True
    )] = ""
    load_format: Annotated[Literal["safetensors", "dummy"], key(
        "'dummy' draws seeded random weights from config.json alone", changed="executors"
    )] = "safetensors"
    dtype: Annotated[Literal["auto", "float32", "bfloat16", "float16"], key(
        "'auto' is float32 on CPU and the checkpoint's own type on a GPU", changed="executors"
    )] = "auto"
    quantization: Annotated[str, key(
        "What the layers' weights are rounded to at load, the LM head's less or not: 'none' loses nothing; 'float16' "
        "and 'int8' on a CPU, 'int8', 'fp8' and 'int4' on a GPU, or what a plugin offers", changed="executors"
    )] = "none"
    experts: Annotated[Literal["cut", "divided"], key(
        "How ranks share a mixture of experts: each has a part of every expert, or some experts whole",
        changed="executors"
    )] = "cut"
    score_tokens: Annotated[tuple[str, ...], key(
        "Serves a language model as a reranker: a score is the first token's logit less the second's, as [\"yes\", "
        '"no"] for Qwen3-Reranker; empty for what the checkpoint says', max_length=2
    )] = ()
    score_template: Annotated[str, key(
        "File of a Jinja template that makes a prompt of a message with role query and one with role document; "
        "empty for the checkpoint's chat template if it knows these roles", is_place=True
    )] = ""
    numerics: Annotated[Literal["fast", "invariant"], key(
        "'invariant': a request gets the same tokens and log probabilities, to the bit, whatever else runs; "
        "checked at start; not yet tried on GPUs", changed="executors"
    )] = "fast"
    max_model_len: Annotated[int, key(
        "Longest prompt plus output in tokens; 0 for what the model was trained for", ge=0
    )] = 0


class LoraSection(Section, frozen=True):
    """[lora]: adapters beside the model, chosen by their names as models."""

    folder: Annotated[str, key(
        "Adapters as PEFT saves them lie below: at start each of its folders is served by its name, others can be "
        "loaded from there; empty for none", is_place=True
    )] = ""
    max_adapters: Annotated[int, key(
        "Most adapters that requests run with at once; others wait", ge=1, le=256, changed="executors"
    )] = 8
    max_rank: Annotated[int, key(
        "Largest rank of an adapter; each takes memory and time for that rank", ge=1, le=512
    )] = 16


class DeviceSection(Section, frozen=True):
    """[device]: where the model runs."""

    kind: Annotated[Literal["auto", "cpu", "cuda"], key("'auto' takes a GPU where there is one")] = "auto"
    tensor_parallel: Annotated[int, key(
        "Ranks that share the model, each on a GPU of its own or on the CPU", ge=1, le=64
    )] = 1
    threads: Annotated[int, key(
        "CPU threads for the model; 0 for what is fastest, measured at start and again when steps become slow",
        ge=0, changed="executors"
    )] = 0
    seed: Annotated[int, key("Seeds dummy weights and requests that bring no seed of their own; 0 draws one", ge=0)] = 0


class KVSection(Section, frozen=True):
    """[kv]: the paged KV cache."""

    changed: ClassVar[Changed] = "executors"

    page_size: Annotated[Literal[1, 4, 8, 16, 32, 64, 128, 256], key("Tokens per page")] = 16
    dtype: Annotated[Literal["auto", "float32", "bfloat16", "float16", "int8", "fp8_e4m3"], key(
        "What pages keep keys and values in: 'auto' is the model's own type, int8 (for a CPU) and fp8_e4m3 (for a "
        "GPU) take the least memory"
    )] = "auto"
    num_pages: Annotated[int, key("Pages in the pool; 0 sizes it from memory_fraction", ge=0)] = 0
    layout: Annotated[Literal["layer_first", "page_first"], key(
        "'page_first' makes each page one block over all layers, for cheaper copies between tiers"
    )] = "layer_first"
    num_host_pages: Annotated[int, key(
        "Pages of host memory that evicted pages move to and come back from; 0 for none", ge=0
    )] = 0
    store_timeout_s: Annotated[float, key(
        "How long a prompt waits for its pages from plugins.kv_store, to go on without", gt=0
    )] = 0.5
    store_buffer_mb: Annotated[int, key(
        "Host memory of a rank for pages on their way from plugins.kv_store, and as much to it", ge=1
    )] = 256
    memory_fraction: Annotated[float, key(
        "Share of free memory for the pool, on CPU at most 4 GiB; 0 for 0.85 on CPU, 0.9 on a GPU", ge=0, le=0.98
    )] = 0.0

    def kept_as(self, dtype: str) -> str:
        """What pages keep, if that is another type than ``dtype``, the model's; '' if not, or if ``dtype`` is '' and it
        may be the same."""
        same = self.dtype in ("auto", dtype) or (not dtype and self.dtype in ("float32", "bfloat16", "float16"))
        return "" if same else self.dtype


class SchedulerSection(Section, frozen=True):
    """[scheduler]: what runs in a step."""

    changed: ClassVar[Changed] = "executors"

    max_running: Annotated[int, key(
        "Most sequences in a batch; 0 for 64 on CPU, 256 or 512 on a GPU", ge=0, le=4096
    )] = 0
    max_step_tokens: Annotated[int, key(
        "Token budget of a step: decodes first, prefill chunks after; 0 for 2048 on CPU, 8192 on a GPU", ge=0
    )] = 0
    prefill_chunk: Annotated[int, key(
        "Most prompt tokens of one request in a step beside decodes; 0 for 512 on CPU, 2048 on a GPU",
        ge=0, changed="live"
    )] = 0
    itl_target_ms: Annotated[float, key(
        "Prefills are cut so that running requests get a token this often; 0 for no target", ge=0, changed="live"
    )] = 0.0
    overlap_depth: Annotated[int, key(
        "Steps in flight; 2 plans a step while the one before it runs", ge=1, le=2, changed="live"
    )] = 2


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
        "How processes are reached: 'unix', 'unix:DIRECTORY' for sockets below it, or 'tcp://HOST:PORT' (port 0: "
        "any), encrypted and authenticated", is_place=True, pattern=r"^(unix|unix:.+|tcp://[^/]+:[0-9]+)$"
    )] = "unix"
    cluster_key: Annotated[str, key(
        "Secret of at least 32 characters that ranks on other machines prove to have; best set as "
        "CALLBOARD_PLACEMENT__CLUSTER_KEY; never printed"
    )] = ""
    join_timeout_s: Annotated[float, key(
        "How long the ranks on other machines may take to join, and to find the server", gt=0
    )] = 300.0
    step_timeout_s: Annotated[float, key(
        "An executor that takes longer than this for a step is restarted; 0 for never", ge=0, changed="executors"
    )] = 120.0
    silence_timeout_s: Annotated[float, key(
        "A process that has said nothing for longer than this is restarted", gt=0
    )] = 10.0
    max_restarts: Annotated[int, key(
        "Restarts within five minutes; one more ends the engine with an error. From 2 on, a request that ends "
        "executors is found and ends instead", ge=0
    )] = 3


class GraphsSection(Section, frozen=True):
    """[graphs]: steps that are captured once and replayed, without the model's Python."""

    changed: ClassVar[Changed] = "executors"

    mode: Annotated[Literal["auto", "off", "decode", "breakable", "compiled"], key(
        "'decode' captures decode steps alone, 'breakable' also the model between attention calls for steps with "
        "prefill, 'compiled' compiles that too; 'auto' is breakable on a GPU, off on CPU"
    )] = "auto"
    max_rows: Annotated[int, key("Largest captured decode batch; larger ones run as they are", ge=1)] = 512
    max_tokens: Annotated[int, key(
        "Largest captured step with prefill, in tokens; larger ones run as they are, or compiled for any number", ge=1
    )] = 4096
    split_ops: Annotated[list[str], key(
        "Operations that are run as they are, between graphs and pieces, e.g. ['acme::route']"
    )] = []
    autotune: Annotated[bool, key(
        "With mode 'compiled': each size is also compiled by itself, with autotuning, when it is first met; takes "
        "minutes, once"
    )] = False


class AttentionNames(Section, frozen=True):
    """Attention backends by what a sequence does in a step: reads a part of its prompt, or writes its next token."""

    prefill: str = "auto"
    decode: str = "auto"


class PluginsSection(Section, frozen=True):
    """[plugins]: which implementation stands behind each hook, and their own option tables."""

    attention: Annotated[str | AttentionNames, key(
        "Attention backend, or { prefill = ..., decode = ... }; 'auto' picks by device and model", changed="executors"
    )] = "auto"
    race_s: Annotated[float, key(
        "How long 'auto' may measure attention backends at the first start with a model's heads, where more than "
        "one can run; compilers have eight minutes before that; 0 for never: the first of a fixed order then",
        ge=0, changed="executors"
    )] = 60.0
    eviction: Annotated[str, key(
        "What leaves the prefix cache first: lru, lfu, fifo, slru, s3fifo, priority; 'auto' is lru", changed="executors"
    )] = "auto"
    policy: Annotated[str, key(
        "Who of those that wait runs first: priority, fcfs, lpm, fair; 'auto' is fair where clients have keys, else "
        "priority", changed="live"
    )] = "auto"
    grammar: Annotated[str, key("What makes output follow a schema or grammar; 'auto' is llguidance")] = "auto"
    linear: Annotated[str, key(
        "What multiplies by weights; 'auto' measures which of those for model.quantization is fastest",
        changed="executors"
    )] = "auto"
    tool_parser: Annotated[str, key("How the model writes function calls; 'auto' goes by its chat template")] = "auto"
    reasoning_parser: Annotated[str, key(
        "How the model marks thoughts; 'none': they are text; 'auto' goes by its chat template"
    )] = "auto"
    comm: Annotated[str, key(
        "Communication library between ranks, 'auto' picks by world size", changed="executors"
    )] = "auto"
    kv_store: Annotated[str, key(
        "Where KV pages are kept beyond the pool and the process: files; 'none' is nowhere", changed="executors"
    )] = "none"
    proposer: Annotated[str, key(
        "What guesses the next tokens for a step to verify: ngram, suffix, draft_model, eagle; 'none' is none",
        changed="executors"
    )] = "none"
    observers: Annotated[list[str], key(
        "Who is told of finished requests and cached pages: any number of names, e.g. ['log']"
    )] = []
    graph_passes: Annotated[list[str], key(
        "What changes the model's pieces before graphs.mode=compiled compiles them, in this order", changed="executors"
    )] = []
    logits_processors: Annotated[list[str], key(
        "Logits processors that requests may name in logits_processors, applied in this order"
    )] = []
    models: Annotated[list[str], key(
        "Model families that are asked before the built-in ones; 'transformers' reads all decoders", changed="executors"
    )] = []
    options: Annotated[dict[str, dict[str, Any]], key(
        "Option table per plugin, e.g. [plugins.options.'attention.torch']", changed="executors", is_place=True
    )] = {}


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
    max_connections: Annotated[int, key("Most open connections", ge=1)] = 2048
    max_body_bytes: Annotated[int, key("Largest request body", ge=1024)] = 4 << 20
    client_timeout_s: Annotated[float, key(
        "How long a client may take to send headers, to send a body (and a second more for each 64 KiB), or read "
        "nothing of an answer", gt=0
    )] = 15.0
    ping_after_s: Annotated[float, key(
        "A stream that has sent nothing for so long sends a ping, and with the first one its status 200; 0 for never",
        ge=0,
    )] = 15.0
    drain_timeout_s: Annotated[float, key("After SIGTERM, how long running requests may go on", ge=0)] = 30.0
    shared_cache: Annotated[bool, key(
        "Whether clients with different keys share cached prefixes; timing then tells of others' prompts"
    )] = False
    cors_origins: Annotated[list[str], key(
        "Web pages that browsers may call from, e.g. ['https://chat.example.org']; '*' for any"
    )] = []
    allowed_hosts: Annotated[list[str], key(
        "Public names by which clients without a key may call the server, e.g. ['llm.example.org'] behind a "
        "proxy; '*' for any"
    )] = []
    profile_folder: Annotated[str, key(
        "Where /start_profile has executors write traces of their steps; empty: there are no profiles",
        is_place=True
    )] = ""
    traces: Annotated[str, key(
        "Where OpenTelemetry spans go, e.g. 'http://127.0.0.1:4318/v1/traces'; empty for none", is_place=True
    )] = ""

    models_memory_mb: Annotated[int, key(
        "Most memory that loaded [[models]] may take together; the idle one used longest ago is unloaded for "
        "another; 0 for no limit", ge=0
    )] = 0

    @property
    def needs_key(self) -> bool:
        """Whether clients must bring a key."""
        return any(self.api_key) or bool(self.key_file)


class LimitsSection(Section, frozen=True):
    """[limits]: what is admitted; beyond it clients get 429 with Retry-After."""

    changed: ClassVar[Changed] = "live"

    max_requests: Annotated[int, key("Most requests open at once, running or waiting", ge=1, le=65536)] = 512
    max_queued_tokens: Annotated[int, key(
        "Most prompt tokens of all open requests (estimated from text)", ge=1
    )] = 4_000_000
    max_requests_per_client: Annotated[int, key(
        "Most open requests of one client, by API key or else by address; 0 for no such limit", ge=0
    )] = 0
    requests_per_minute: Annotated[int, key(
        "Most requests that one client may begin in a minute; 0 for no such limit", ge=0
    )] = 0
    tokens_per_minute: Annotated[int, key(
        "Most tokens of one client in a minute, prompts and output; 0 for no such limit", ge=0
    )] = 0
    first_token_timeout_s: Annotated[float, key(
        "A request that has had no token for so long gets 503 with Retry-After; 0 for never", ge=0
    )] = 0.0
    request_timeout_s: Annotated[float, key("Longest time a request may take in all", gt=0)] = 600.0


class StorageSection(Section, frozen=True):
    """[storage]: what the server writes to disk of its clients' requests; nothing, unless a folder is named."""

    folder: Annotated[str, key(
        "Where files, batches, stored responses, the journal and recordings lie; empty: nothing is written",
        is_place=True
    )] = ""
    quota_mb: Annotated[int, key(
        "Most that what one API key has stored may take, files, responses and batches; beyond it it gets 400", ge=1
    )] = 1024
    max_file_mb: Annotated[int, key("Largest file that a client may upload", ge=1)] = 200
    retention_hours: Annotated[int, key(
        "After how long files, responses and batches that have ended go; 0 for never", ge=0
    )] = 720
    trace_mb: Annotated[int, key(
        "Most disk for traces of traffic, without texts, for `callboard whatif`; 0 for no traces", ge=0
    )] = 0
    journal_streams: Annotated[bool, key(
        "Write streams down, so that clients can rejoin them, also after a crash of the server"
    )] = False
    fsync: Annotated[Literal["always", "interval", "never"], key(
        "What a loss of power may take of the journal: nothing, a second, or what the system had not written; a "
        "crash of the server takes nothing"
    )] = "interval"
    journal_mb: Annotated[int, key("Most that the journal may take, on disk and in memory, in MiB", ge=8)] = 256
    rejoin_s: Annotated[float, key(
        "How long a stream runs on without its client, and can be asked for after its end", gt=0
    )] = 60.0
    recording_mb: Annotated[int, key(
        "Memory for the last minutes of what the scheduler was told, written to the folder when something goes "
        "wrong; 0 for no recording", ge=0, le=4096
    )] = 32
    recording_prompts: Annotated[Literal["whole", "hashed"], key(
        "Tokens in recordings: as they are, or replaced by others of the same equality"
    )] = "hashed"


class ModelTable(Section, frozen=True):
    """[[models]]: one of several models that a server has; its own sections are laid over the file's."""

    name: Annotated[str, key("What requests put into model; each model has its own", min_length=1)]
    load: Annotated[Literal["start", "demand"], key(
        "'start': with the server; 'demand': when a request asks for it"
    )] = "start"
    unload_after_s: Annotated[float, key(
        "Unloaded when it has been idle for so long; 0 for never by time alone", ge=0
    )] = 0.0
    memory_mb: Annotated[int, key(
        "What it takes of server.models_memory_mb; 0 measures its processes, which does not see a GPU's memory", ge=0
    )] = 0
    model: Annotated[dict[str, Any], key("[models.model], over the file's [model]")] = {}
    device: Annotated[dict[str, Any], key("[models.device], likewise")] = {}
    kv: Annotated[dict[str, Any], key("[models.kv], likewise")] = {}
    scheduler: Annotated[dict[str, Any], key("[models.scheduler], likewise")] = {}
    graphs: Annotated[dict[str, Any], key("[models.graphs], likewise")] = {}
    placement: Annotated[dict[str, Any], key("[models.placement], likewise")] = {}
    plugins: Annotated[dict[str, Any], key("[models.plugins], likewise")] = {}

    def sections(self) -> dict[str, dict[str, Any]]:
        """Section -> what this model has of its own in it."""
        own = ("model", "device", "kv", "scheduler", "graphs", "placement", "plugins")
        tables: dict[str, dict[str, Any]] = {name: getattr(self, name) for name in own}
        return {**tables, "model": {**self.model, "name": self.name}}


# fmt: on
