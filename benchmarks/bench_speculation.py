"""What does speculation bring, and what does it cost where nothing can be guessed?

The demo model answers by greedy decoding, whose text repeats what it was given, and by sampling, which repeats little;
prompts are code to go on with, several turns of it, and random tokens.  Engines with and without a proposer take turns,
and each figure is the best of them: the ratio of tokens per second to those without, and of tokens per second of
processor time, which other work on the machine disturbs less.  Greedy tokens must be the same.

``--draft`` measures draft models instead.  The model has twelve layers of half the width of Qwen3-0.6B, a small
vocabulary and random weights, and its draft model is its first layer alone, a sixth of it: the more the others add, the
less often the two agree.

    python benchmarks/bench_speculation.py --json benchmarks/results/speculation_2core_cpu.json
    python benchmarks/bench_speculation.py --draft --batches 1 4 --tokens 96 \\
        --json benchmarks/results/draft_model_2core_cpu.json
"""

import json
import random
import tempfile
import time
from pathlib import Path
from typing import Any

from machine import keep, new_parser
from rich.console import Console
from rich.table import Table

from callboard import LLM, SamplingParams

ROOT = Path(__file__).parents[1]
DEMO = ROOT / "examples" / "demo_model"
PROPOSERS = ("none", "ngram", "suffix")
SOURCE = (ROOT / "engine" / "scheduling" / "decodes.py").read_text()
Prompt = str | list[int]


def editing(index: int) -> Prompt:
    """Code that is copied with changes."""
    return f"{SOURCE[:1200]}\n\n# The same once more, number {index}:\n\n{SOURCE[:200]}"


def turns(index: int) -> Prompt:
    """A question about code, some answers, and the question again."""
    parts = (f"# {index}\n{SOURCE[at : at + 300]}\n# again:\n{SOURCE[at : at + 150]}" for at in (0, 300, 0))
    return "\n".join(parts)


def noise(index: int) -> Prompt:
    """Tokens that mean nothing."""
    rng = random.Random(index)
    return [rng.randrange(100, 3000) for _ in range(300)]


NUM_LAYERS = 12
ADDED = (0.0, 0.01, 0.03, 1.0)
WORKLOADS = {"editing": (editing, 0.0), "turns": (turns, 0.0), "sampled": (editing, 1.0), "random": (noise, 1.0)}
GREEDY_NOISE = "random tokens, greedy"


def measure(engines: dict[str, LLM], name: str, batch: int, num_tokens: int, rounds: int) -> dict[str, Any]:
    """The best seconds of each engine, which take turns, and what became of proposals."""
    make, temperature = WORKLOADS.get(name, (noise, 0.0))
    prompts = [make(index) for index in range(batch)]
    params = [
        SamplingParams(temperature=temperature, seed=index, max_tokens=num_tokens, ignore_eos=True)
        for index in range(batch)
    ]
    best, cpu = dict.fromkeys(engines, float("inf")), dict.fromkeys(engines, float("inf"))
    said, accepted = {}, dict.fromkeys(engines, 0)
    every_right, every_wrong = dict.fromkeys(engines, 0), dict.fromkeys(engines, 0)  # of all rounds
    for _ in range(rounds):
        for proposer, llm in engines.items():
            began, cpu_began = time.perf_counter(), time.process_time()
            found = llm.generate(prompts, params)
            best[proposer] = min(best[proposer], time.perf_counter() - began)
            cpu[proposer] = min(cpu[proposer], time.process_time() - cpu_began)
            said[proposer] = [one.token_ids for one in found]
            accepted[proposer] = sum(one.usage.accepted_tokens for one in found)
            every_right[proposer] += accepted[proposer]
            every_wrong[proposer] += sum(one.usage.rejected_tokens for one in found)
    if not temperature:
        assert all(tokens == said["none"] for tokens in said.values()), f"{name}: speculation has changed tokens"
    ratios = {proposer: round(best["none"] / seconds, 2) for proposer, seconds in best.items()}
    cpu_ratios = {proposer: round(cpu["none"] / seconds, 2) for proposer, seconds in cpu.items()}
    share = {proposer: round(count / (batch * num_tokens), 2) for proposer, count in accepted.items()}
    right = {one: round(every_right[one] / max(1, every_right[one] + every_wrong[one]), 2) for one in engines}
    named = {"workload": name, "batch": batch, "seconds": best}
    return {**named, "ratio": ratios, "cpu_ratio": cpu_ratios, "accepted_share": share, "right_share": right}


def write_pair(folder: Path, added: float) -> None:
    """folder/model and folder/draft.  added: how much the layers behind the first one add, of what that one does."""
    import torch
    from safetensors.torch import save_file

    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": (hidden := 512),
        "intermediate_size": (inner := 1536),
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "vocab_size": (vocab := 8192),
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
    }
    parts = {
        "self_attn.q_proj": (1024, hidden),
        "self_attn.k_proj": (512, hidden),
        "self_attn.v_proj": (512, hidden),
        "self_attn.o_proj": (hidden, 1024),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    generator = torch.Generator().manual_seed(0)

    def drawn(shape: tuple[int, ...], scale: float) -> "torch.Tensor":
        return torch.randn(shape, generator=generator) * scale

    tensors = {name: drawn((vocab, hidden), 0.04) for name in ("model.embed_tokens.weight", "lm_head.weight")}
    tensors["model.norm.weight"] = torch.ones(hidden)
    for layer in range(NUM_LAYERS):
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"model.layers.{layer}.{norm}.weight"] = torch.ones(hidden)
        for part, shape in parts.items():
            share = added if layer and part.endswith(("o_proj", "down_proj")) else 1.0
            tensors[f"model.layers.{layer}.{part}.weight"] = drawn(shape, 0.04 * share)
    for name, num_layers in (("model", NUM_LAYERS), ("draft", 1)):
        (folder / name).mkdir()
        later = tuple(f"model.layers.{layer}." for layer in range(num_layers, NUM_LAYERS))
        kept = {key: value for key, value in tensors.items() if not key.startswith(later)}
        save_file(kept, folder / name / "model.safetensors")
        (folder / name / "config.json").write_text(json.dumps(config | {"num_hidden_layers": num_layers}))


def measure_drafts(batches: list[int], num_tokens: int, rounds: int) -> list[dict[str, Any]]:
    """As ``measure``, for draft models that agree more or less often."""
    rows = []
    for added in ADDED:
        with tempfile.TemporaryDirectory() as folder:
            write_pair(Path(folder), added)
            base = {
                "model": {"path": f"{folder}/model", "tokenizer": "none"},
                "device": {"threads": 1},
                "kv": {"num_pages": 128},
            }
            options = {"proposer.draft_model": {"path": f"{folder}/draft", "num_tokens": 4}}
            drafting = {"plugins": {"proposer": "draft_model", "options": options}}
            engines = {"none": LLM(progress=False, config=base), "draft": LLM(progress=False, config=base | drafting)}
        for batch in batches:
            row = measure(engines, GREEDY_NOISE, batch, num_tokens, rounds)
            rows.append({**row, "added": added})
        for llm in engines.values():
            llm.close()
    return rows


def main() -> None:
    """Print a table, and write the figures if asked to."""
    parser = new_parser(__doc__)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--tokens", type=int, default=160)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--draft", action="store_true", help="measure draft models instead")
    given = parser.parse_args()
    if given.draft:
        rows = measure_drafts(given.batches, given.tokens, given.rounds)
        table = Table("others add", "batch", "accepted of output", "accepted of drafted", "ratio", "of CPU")
        for row in rows:
            shares = (row["accepted_share"]["draft"], row["right_share"]["draft"])
            ratios = (row["ratio"]["draft"], row["cpu_ratio"]["draft"])
            table.add_row(
                f"{row['added']:g}",
                str(row["batch"]),
                *(f"{one:.0%}" for one in shares),
                *(f"{one:.2f}" for one in ratios),
            )
        Console().print(table)
        keep(given.output, {"rows": rows})
        return
    base = {"model": {"path": str(DEMO)}, "device": {"threads": 1}, "kv": {"num_pages": 1024}}
    engines = {name: LLM(progress=False, config={**base, "plugins": {"proposer": name}}) for name in PROPOSERS}
    table = Table("workload", "batch", *(f"{name}: ratio, of CPU" for name in PROPOSERS[1:]), "accepted (ngram)")
    rows = []
    for name in WORKLOADS:
        for batch in given.batches:
            row = measure(engines, name, batch, given.tokens, given.rounds)
            rows.append(row)
            shown = [f"{row['ratio'][one]:.2f}, {row['cpu_ratio'][one]:.2f}" for one in PROPOSERS[1:]]
            table.add_row(name, str(batch), *shown, f"{row['accepted_share']['ngram']:.0%}")
    for llm in engines.values():
        llm.close()
    Console().print(table)
    keep(given.output, {"rows": rows})


if __name__ == "__main__":
    main()
