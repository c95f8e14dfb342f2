"""The kinds of plugins: the hook that builds one, the setting that names it, and the built-in ones.

Owns: the only table of kinds, to which folders of ``engine/plugins`` may add.
Does not know: the search for plugins, their loading, what they build.
"""

import pkgutil
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Final

from engine.config import Config
from engine.plugins.kind import Kind
from engine.plugins.kind import new_kind as _kind
from engine.settings.attention_names import AttentionNames
from engine.settings.sections import PluginsSection
from engine.types.errors import ConfigError

Wanted = str | AttentionNames | list[str]

ATTENTION: Final = "attention"
GRAMMAR: Final = "grammar"
GRAPH_PASS: Final = "graph_pass"  # noqa: S105
LINEAR: Final = "linear"
LOGITS_PROCESSOR: Final = "logits_processor"
MODEL: Final = "model"
OBSERVER: Final = "observer"
PROPOSER: Final = "proposer"
REASONING_PARSER: Final = "reasoning_parser"
TOOL_PARSER: Final = "tool_parser"


# fmt: off
_OWN = (
    _kind(ATTENTION, "attention_backend", "flash_attn flash_mla flashinfer tiles torch triton xqa"),
    _kind("comm", "comm", "local pynccl symmetric torch", default="local", because="there is one rank"),
    _kind("eviction", "eviction_strategy", "fifo lease lfu lru priority s3fifo slru", decides=True,
          default="lru", because="needs no tuning"),
    _kind(GRAMMAR, "grammar_engine", "llguidance", default="llguidance", because="comes with callboard"),
    _kind(GRAPH_PASS, "graph_pass", "", "graph_passes", several=True),
    _kind(LINEAR, "linear", "blocks fbgemm_fp16 fbgemm_int8 onednn panels torch torch_fp8 torch_fp8_block torch_int4 "
          "triton triton_blocks triton_int8 triton_rows"),
    _kind(LOGITS_PROCESSOR, "logits_processor", "no_repeat_ngram thinking_budget", "logits_processors", several=True),
    _kind(MODEL, "model", "apertus bamba cohere deepseek_v2 deepseek_v3 deepseek_v32 ernie4_5 exaone4 falcon_h1 gemma2 "
          "gemma3 gemma4 glm4 glm4_moe glm4_moe_lite glm_moe_dsa gpt2 gpt_oss granite granite_hybrid hunyuan "
          "kimi_linear lfm2 llama llama4 minimax minimax_m2 ministral3 mistral mistral4 mixtral nemotron nemotron_h "
          "olmo2 olmo3 olmo_hybrid phi3 qwen2 qwen3 qwen3_moe qwen3_next seed_oss smollm3 transformers", "models",
          several=True, by_model=True),
    _kind(OBSERVER, "observer", "kv_events log", "observers", several=True),
    _kind("policy", "scheduling_policy", "fair fcfs lpm priority", decides=True,
          default="priority", because="first come, first served where no request sends a priority"),
    _kind(PROPOSER, "proposer", "draft_model eagle mtp ngram suffix", decides=True),
    _kind(REASONING_PARSER, "reasoning_parser", "granite harmony think", by_model=True),
    _kind(TOOL_PARSER, "tool_parser", "deepseek_v3 glm4 harmony hermes kimi_k2 llama3_json mistral pythonic "
          "qwen3_coder", by_model=True),
)
# fmt: on


def _brought() -> Iterator[Kind]:
    """Return the kinds that folders bring: each a ``kind.py`` in the folder of the kind's plugins."""
    here = Path(__file__).parent
    for folder in pkgutil.iter_modules([str(here)]):
        if folder.ispkg and (here / folder.name / "kind.py").is_file():
            kind: Kind = import_module(f"{__package__}.{folder.name}.kind").KIND
            yield kind


KINDS: Final[Mapping[str, Kind]] = {
    kind.name: kind for kind in sorted((*_OWN, *_brought()), key=lambda kind: kind.name)
}


def named(section: PluginsSection, kind: str) -> Wanted:
    """Return the configured name or names of a kind, as they are set."""
    wanted: Wanted = getattr(section, KINDS[kind].setting)
    return wanted


def chosen_plugins(config: Config) -> dict[str, Wanted]:
    """Return the configured names by kind, 'auto' for the kind's own default.

    Kinds that are set to 'none' are omitted, and those whose plugins the model's files choose.
    Raises ConfigError if that leaves out what every engine needs."""
    for one in KINDS.values():
        if one.default and named(config.plugins, one.name) == "none":
            choices = f"'auto', {', '.join(one.built_in)}, or one of another package"
            raise ConfigError(f"plugins.{one.setting}='none': an engine needs one; expected {choices}")
    wanted = {one.name: named(config.plugins, one.name) for one in KINDS.values() if not one.by_model}
    chosen: dict[str, Wanted] = {kind: names for kind, names in wanted.items() if names != "none"}
    if chosen["comm"] == "auto" and config.device.tensor_parallel > 1:
        chosen["comm"] = "torch"  # the default is for one rank
    if chosen["policy"] == "auto" and config.server.needs_key:
        chosen["policy"] = "fair"  # a client's priority counts among its own requests; key_file may get more keys
    return chosen
