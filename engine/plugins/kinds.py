"""The kinds of plugins: the hook that builds one, the setting that names it, and the built-in ones.

Owns: the only table of kinds.  Does not know: the search for plugins, their loading, what they build.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from engine.config import Config
from engine.settings.sections import AttentionNames

Wanted = str | AttentionNames | list[str]

ATTENTION: Final = "attention"
GRAMMAR: Final = "grammar"
GRAPH_PASS: Final = "graph_pass"  # noqa: S105
KV_STORE: Final = "kv_store"
LINEAR: Final = "linear"
LOGITS_PROCESSOR: Final = "logits_processor"
MODEL: Final = "model"
OBSERVER: Final = "observer"
PROPOSER: Final = "proposer"
REASONING_PARSER: Final = "reasoning_parser"
TOOL_PARSER: Final = "tool_parser"


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of plugin.  Its plugins are named '<kind>.<name>', also in [plugins.options].

    hook: builds a plugin.  built_in: the plugins that come with callboard, each a module of engine.plugins.<kind>.
    setting: the key of [plugins] that names plugins; options change at run time if and as it does.
    several: any number of plugins may be chosen.  by_model: the model's files decide if the setting does not.
    decides: the plugins affect plans of the scheduler.
    default: the plugin for 'auto'; '' if more than the configuration decides.  because: the reason, for the log.
    """

    name: str
    hook: str
    built_in: tuple[str, ...]
    setting: str
    several: bool = False
    by_model: bool = False
    decides: bool = False
    default: str = ""
    because: str = ""


def _kind(name: str, hook: str, built_in: str, setting: str = "", **more: Any) -> Kind:
    return Kind(name, f"callboard_{hook}", tuple(built_in.split()), setting or name, **more)


# fmt: off
KINDS: Final[Mapping[str, Kind]] = {kind.name: kind for kind in (
    _kind(ATTENTION, "attention_backend", "flash_attn flashinfer tiles torch triton xqa"),
    _kind("comm", "comm", "local pynccl symmetric torch", default="local", because="there is one rank"),
    _kind("eviction", "eviction_strategy", "fifo lfu lru priority s3fifo slru", decides=True,
          default="lru", because="needs no tuning"),
    _kind(GRAMMAR, "grammar_engine", "llguidance", default="llguidance", because="comes with callboard"),
    _kind(GRAPH_PASS, "graph_pass", "", "graph_passes", several=True),
    _kind(KV_STORE, "kv_store", "files"),
    _kind(LINEAR, "linear", "fbgemm_fp16 fbgemm_int8 onednn panels torch torch_fp8 torch_fp8_block torch_int4 triton "
          "triton_int8"),
    _kind(LOGITS_PROCESSOR, "logits_processor", "no_repeat_ngram", "logits_processors", several=True),
    _kind(MODEL, "model", "cohere deepseek_v2 deepseek_v3 ernie4_5 exaone4 gemma2 gemma3 glm4 glm4_moe gpt2 gpt_oss "
          "granite granite_hybrid llama mistral mixtral olmo2 olmo3 phi3 qwen2 qwen3 qwen3_moe seed_oss smollm3 "
          "transformers", "models",
          several=True, by_model=True),
    _kind(OBSERVER, "observer", "log", "observers", several=True),
    _kind("policy", "scheduling_policy", "fair fcfs lpm priority", decides=True,
          default="priority", because="first come, first served where no request sends a priority"),
    _kind(PROPOSER, "proposer", "draft_model eagle ngram suffix", decides=True),
    _kind(REASONING_PARSER, "reasoning_parser", "granite harmony think", by_model=True),
    _kind(TOOL_PARSER, "tool_parser", "deepseek_v3 glm4 harmony hermes kimi_k2 llama3_json mistral pythonic "
          "qwen3_coder", by_model=True),
)}
# fmt: on


def chosen_plugins(config: Config) -> dict[str, Wanted]:
    """Return the configured names by kind, 'auto' for the kind's own default.

    Kinds that are set to 'none' are omitted, and those whose plugins the model's files choose."""
    wanted = {one.name: getattr(config.plugins, one.setting) for one in KINDS.values() if not one.by_model}
    chosen: dict[str, Wanted] = {kind: names for kind, names in wanted.items() if names != "none"}
    if chosen["comm"] == "auto" and config.device.tensor_parallel > 1:
        chosen["comm"] = "torch"  # the default is for one rank
    if chosen["policy"] == "auto" and config.server.needs_key:
        chosen["policy"] = "fair"  # a client's priority counts among its own requests; key_file may get more keys
    return chosen
