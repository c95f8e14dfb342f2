"""The sections, the sizes in which a CPU computes them, and how long each may take.

Owns: the table, how a section is called.  Imports none of them, nor torch.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any

from gpu_sections.shapes import SMALL_QWEN3, TINY_HYBRIDS

if TYPE_CHECKING:
    import torch

LIMIT_S = 120.0
PIECE_S = 600.0  # of a command on a machine that is lent
STARTS_S = 10.0  # of a section's process, and of writing what it has found
LONGEST_S = PIECE_S - 2 * STARTS_S


@dataclass(frozen=True)
class Section:
    """A section.  function: 'module:function', (device, sizes) -> rows; imported only in the section's own process.
    small: sizes for a CPU and to warm up with; what it leaves out is as on a GPU.
    limit_s: seconds that it may take.  timed: whether it is there for times, which a section beside it would change."""

    function: str
    small: Mapping[str, Any] = field(default_factory=dict)
    limit_s: float = LIMIT_S
    timed: bool = True

    def rows(self, device: "torch.device", small: bool) -> Iterator[dict[str, Any]]:
        """Yield the rows as they come."""
        module, _, name = self.function.partition(":")
        yield from getattr(import_module(module), name)(device, **(self.small if small else {}))


MODEL = {"config": SMALL_QWEN3}
DECODES = {**MODEL, "batches": (1, 2), "context": 40, "num_steps": 4}
VARIANT = {**MODEL, "batches": (1, 2), "num_out": 9, "prompt_len": 12}
LIBRARY = {"rows": 3, "context": 40, "kit": 1}
SECTIONS: Mapping[str, Section] = {
    # For compilers that find nothing of theirs on disk, so that the others need not wait for them.
    "warm_up": Section("gpu_sections.warm_up:warm_up", {"names": ("sampler",)}, limit_s=LONGEST_S),
    "attention_torch": Section("gpu_sections.attention_torch:attention"),
    "attention_triton": Section(
        "gpu_sections.attention_triton:section",
        {"kit": ("one row", "padded decode"), "replays": ((3, 40),), "repeats": (1, 150, 1)},
        timed=False,
    ),
    "attention_triton_speed": Section("gpu_sections.attention_triton_speed:decodes", {"shapes": ((2, 40),)}),
    "attention_triton_prompts": Section("gpu_sections.attention_triton_speed:prompts", {"shapes": ((1, 20),)}),
    "attention_triton_tuning": Section(
        "gpu_sections.attention_triton_speed:tuning", {"batches": (1,), "contexts": (1024,)}
    ),
    "attention_shared": Section("gpu_sections.attention_shapes:shared", {"sizes": ((2, 32, 16),)}),
    "attention_latents": Section("gpu_sections.attention_shapes:latents", {"sizes": ((16, 1, 32),)}),
    "flashinfer": Section("gpu_sections.attention_libraries:flashinfer", LIBRARY),
    # Its kernels for these pages are compiled at their first use.
    "flashinfer_fp8": Section("gpu_sections.attention_libraries:flashinfer_fp8", LIBRARY, limit_s=LONGEST_S),
    "xqa": Section("gpu_sections.attention_libraries:xqa", LIBRARY),
    "flash_attn": Section("gpu_sections.attention_libraries:flash_attn", LIBRARY),
    "flash_mla": Section("gpu_sections.attention_libraries:flash_mla", LIBRARY),
    "attention_race": Section("gpu_sections.race:section", {"models": ((2, 1, 1),)}, limit_s=300.0),
    "kernels": Section("gpu_sections.kernels:section"),
    "dependent_launch": Section("gpu_sections.dependent_launch:section", {"num_links": 2, "sizes": (4,)}),
    "experts": Section(
        "gpu_sections.experts:section", {"num_experts": 8, "hidden_size": 32, "expert_size": 16, "batches": (1, 3)}
    ),
    "four_bits": Section(
        "gpu_sections.experts:four_bits", {"num_experts": 8, "hidden_size": 96, "expert_size": 64, "batches": (1, 9)}
    ),
    "eight_bits": Section(
        "gpu_sections.experts:eight_bits", {"num_experts": 8, "hidden_size": 128, "expert_size": 128, "batches": (1,)}
    ),
    "four_bit_linears": Section(
        "gpu_sections.four_bit_linears:section",
        {"shapes": ((70, 128),), "groups": (64, 32), "rows": (1, 20), "ring_bytes": 1},
    ),
    "linears": Section("gpu_sections.linears:section"),
    "sampler": Section("gpu_sections.sampler:sampler"),
    "kernel_sampler": Section("gpu_sections.kernel_sampler:section", {"vocab_size": 200, "batches": (2,)}),
    "host_pool": Section("gpu_sections.host_pool:host_pool", {"num_layers": 2, "num_bytes": 1 << 21}),
    "weights": Section("gpu_sections.weights:weights", {"num_bytes": 1 << 20}),
    "stored_pages": Section("gpu_sections.stored_pages:stored_pages", {"num_layers": 2, "num_pages": 5}, timed=False),
    "nccl": Section("gpu_sections.nccl:section"),
    "summed_norms": Section("gpu_sections.summed_norms:section", timed=False),
    "families": Section(
        "gpu_sections.families:section", {"names": ("llama", "deepseek-v3")}, limit_s=400.0, timed=False
    ),
    "greedy": Section(
        "gpu_sections.greedy:greedy", {"num_prompts": 2, "num_out": 12, "graphs": {"mode": "off"}}, timed=False
    ),
    "speculation": Section(
        "gpu_sections.greedy:speculation", {"num_prompts": 2, "num_out": 24, "graphs": {"mode": "off"}}, timed=False
    ),
    "adapters": Section("gpu_sections.adapters:adapters", {"num_out": 8, "graphs": {"mode": "off"}}, timed=False),
    "drafts": Section("gpu_sections.variants:drafts", VARIANT),
    "float8_model": Section("gpu_sections.variants:float8", VARIANT),
    "adapted": Section("gpu_sections.variants:adapted", VARIANT),
    "through_transformers": Section(
        "gpu_sections.greedy:through_transformers",
        {"num_prompts": 2, "num_out": 12, "graphs": {"mode": "off"}},
        timed=False,
    ),
    "pooled": Section(
        "gpu_sections.pooled:pooled",
        {**MODEL, "num_prompts": 2, "prompt_len": 12, "num_pages": 16, "graphs": {"max_tokens": 4}},
    ),
    # The demo model is loaded eighteen times, and its kernels are compiled for sizes of their own.
    "invariance": Section(
        "gpu_sections.invariance:section",
        {"dtypes": ("float32",), "number": 4, "names": ("alone", "together"), "graphs": {"mode": "off"}},
        limit_s=LONGEST_S,
    ),
    "graph_tokens": Section(
        "gpu_sections.graphs:tokens", {"max_tokens": 4, "num_prompts": 2, "num_out": 8}, timed=False
    ),
    # Two sizes, as each is compiled by itself, and longer, as the compiler is Inductor.
    "graph_tokens_compiled": Section(
        "gpu_sections.graphs:tokens_compiled", {"num_prompts": 1, "num_out": 8}, limit_s=300.0, timed=False
    ),
    "graph_decodes": Section("gpu_sections.graphs:decode_steps", DECODES),
    "graph_decodes_14b": Section(
        "gpu_sections.graphs:decode_steps_14b", {**DECODES, "backends": ("triton",), "batches": (1,)}
    ),
    "graph_prefills": Section("gpu_sections.graphs:prefill_steps", {**MODEL, "sizes": (3, 8)}),
    "graph_logprobs": Section(
        "gpu_sections.graph_checks:logprobs",
        {**MODEL, "prompt_lens": (1, 12), "num_out": 8, "num_pages": 16},
        timed=False,
    ),
    "graph_start_up": Section(
        "gpu_sections.graph_checks:start_up", {**MODEL, "max_rows": 1, "max_step_tokens": 4, "num_pages": 16}
    ),
    "graph_captures": Section("gpu_sections.captures:section", {"max_tokens": 4, "max_rows": 1}),
    "recurrences": Section(
        "gpu_sections.recurrences:section",
        {
            "models": {"tiny": ("gated delta rule", (4, 2, 16, 32)), "tinier": ("Mamba 2", (4, 2, 16, 32))},
            "decodes": (2,),
            "prompts": ((1, 70),),
        },
        limit_s=150.0,
    ),
    "hybrids": Section("gpu_sections.hybrids:tokens", {"lengths": (3, 50), "num_out": 8}, timed=False),
    "hybrid_speed": Section(
        "gpu_sections.hybrids:speed",
        {
            "configs": TINY_HYBRIDS,
            "batches": (1, 2),
            "prompt_len": 12,
            "long_prompt": 40,
            "num_out": 4,
            "num_pages": 32,
        },
        limit_s=150.0,
    ),
    "throughput": Section(
        "gpu_sections.throughput:throughput",
        {**MODEL, "batches": (1, 2), "prompt_len": 12, "num_out": 4, "num_pages": 16, "graphs": {"max_tokens": 4}},
    ),
}


def pieces(names: Sequence[str]) -> list[list[str]]:
    """The sections in their order, in as few commands as their limits let fit into PIECE_S each."""
    found: list[list[str]] = []
    left_s = 0.0
    for name in names:
        needed_s = SECTIONS[name].limit_s + STARTS_S
        if needed_s > left_s or not found:
            found.append([])
            left_s = PIECE_S - STARTS_S
        found[-1].append(name)
        left_s -= needed_s
    return found
