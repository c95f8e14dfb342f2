"""Flags of vLLM, SGLang and llama.cpp, and what stands in their place here.

Owns: those names, and the answer to each.  Does not know: what a setting does; ``sections.py`` has its words.
"""

import shlex
from collections.abc import Sequence

from engine.config import Config, json_schema

# A setting, with its value where the flag is a switch -> flags that set it elsewhere.
SETTINGS = {
    "device.tensor_parallel": "--tensor-parallel-size --tp-size --tp -tp",
    "device.threads": "--threads -t",
    "device.seed": "--seed --random-seed",
    "device.kind": "--device",
    "graphs.mode=off": "--enforce-eager --disable-cuda-graph",
    "kv.dtype": "--kv-cache-dtype --cache-type-k --cache-type-v -ctk -ctv",
    "kv.memory_fraction": "--gpu-memory-utilization --mem-fraction-static",
    "kv.page_size": "--block-size --page-size",
    "lora.max_adapters": "--max-loras --max-loras-per-batch",
    "lora.max_rank": "--max-lora-rank",
    "model.dtype": "--dtype",
    "model.load_format": "--load-format",
    "model.max_model_len": "--max-model-len --context-length --ctx-size -c",
    "model.name": "--served-model-name --alias -a",
    "model.quantization": "--quantization -q",
    "model.revision": "--revision",
    "model.tokenizer": "--tokenizer --tokenizer-path",
    "plugins.attention": "--attention-backend",
    "plugins.grammar": "--grammar-backend",
    "plugins.policy": "--scheduling-policy --schedule-policy",
    "plugins.reasoning_parser": "--reasoning-parser",
    "plugins.tool_parser": "--tool-call-parser",
    "scheduler.max_running": "--max-num-seqs --max-running-requests --parallel -np",
    "scheduler.max_step_tokens": "--max-num-batched-tokens --batch-size -b",
    "scheduler.prefill_chunk": "--chunked-prefill-size --ubatch-size -ub",
}
# What is to be done where no setting takes the flag's value -> the flags.
ADVICE = {
    "adapters lie below one folder, each in a folder that has its name: --set lora.folder=FOLDER": (
        "--lora --lora-modules --lora-paths --enable-lora"
    ),
    "the model has no flag: `callboard serve MODEL`, a directory, a .gguf file or org/name": (
        "--model-path --hf-repo -m"
    ),
    "a configuration has no flag: `callboard serve FILE.toml`; `callboard config` prints one": "--config",
    "set CALLBOARD_SERVER__API_KEY, or server.api_key in the file: others on the machine can read arguments": (
        "--api-key"
    ),
    "whole models beside each other are replicas: --replicas N": "--data-parallel-size --dp-size --dp -dp",
    "layers are not shared out over stages; ranks have a part of each: --set device.tensor_parallel=N": (
        "--pipeline-parallel-size --pp-size --pp -pp"
    ),
    "the whole model runs where --set device.kind=cpu or cuda says": "--n-gpu-layers --gpu-layers -ngl",
    "pages that a GPU has no room for move to --set kv.num_host_pages=N": "--swap-space --enable-hierarchical-cache",
    "plugins.proposer says what guesses tokens, and its option table how": (
        "--speculative-config --speculative-algorithm --model-draft -md"
    ),
    "code that comes with a checkpoint is never run; plugins.models names families that are not built in": (
        "--trust-remote-code"
    ),
    "a template lies beside the tokenizer, as chat_template.jinja: --set model.tokenizer=FOLDER": (
        "--chat-template --chat-template-file"
    ),
    "what a model is for is read from its checkpoint; leave it out": (
        "--task --runner --is-embedding --embedding --embeddings"
    ),
    "it is always so here; leave it out": (
        "--enable-prefix-caching --enable-chunked-prefill --enable-auto-tool-choice --enable-sleep-mode "
        "--enable-metrics --metrics --cont-batching -cb --jinja"
    ),
    "set server.tls_key and server.tls_cert": "--ssl-keyfile --ssl-certfile --ssl-key-file --ssl-cert-file",
}


_MEANT = {flag: meant for table in (SETTINGS, ADVICE) for meant, flags in table.items() for flag in flags.split()}


def answers(arguments: Sequence[str]) -> dict[str, str]:
    """Flag -> what stands in its place, for those among the arguments that other servers have."""
    found: dict[str, str] = {}
    for argument, follower in zip(arguments, [*arguments[1:], "-"], strict=True):
        flag, equals, value = argument.partition("=")
        if (meant := _MEANT.get(flag)) in SETTINGS:
            key, _, fixed = meant.partition("=")
            value = fixed or value or ("" if equals or follower.startswith("-") else follower) or "VALUE"
            found[flag] = f"here it is --set {key}={shlex.quote(value)} ({_words(key)})"
        elif meant is not None:
            found[flag] = meant
    return found


def _words(key: str) -> str:
    """What the configuration says of a key."""
    section, _, name = key.partition(".")
    table = json_schema()["$defs"][type(getattr(Config(), section)).__name__]
    return str(table["properties"][name]["description"])
