"""Owns the model card: turns measurements into README.md. No figure in it is typed by hand."""

import platform
from dataclasses import dataclass
from typing import Any

from baseline import Baseline
from checkpoint import Progress
from corpus import LIBRARY_REPEATS
from measure import HeldOut, Sample

HEADER = """\
---
license: other
license_name: psf-2.0
license_link: https://docs.python.org/3/license.html
library_name: transformers
pipeline_tag: text-generation
language: [en, code]
---

<!-- Written by teach.py from its measurements; change card.py rather than this file. -->

# Callboard demo model

A toy of {millions:.1f} million parameters, so that `callboard serve` has a real, trained model to serve the
moment the repository is cloned. It answers questions about callboard and about serving, says that it
knows nothing else, calls a calculator and a clock when they are offered as tools, and completes Python.
It uses the Qwen3 architecture and loads with `transformers`.
"""

KINDS = {
    "facts": "facts, in forms that were held out",
    "own words": "facts and others, in words of our own (`data/examination.toml`)",
    "follow-ups": '"and why?", "how do I set that?" behind a fact',
    "others": "what it does not know, about subjects never seen: must be refused",
    "tool calls": "calls of a calculator or a clock, with numbers never seen",
    "tool results": "answers from a tool's result",
}

USE = """\
## Intended use

Showing and testing a serving engine: real weights, a real tokenizer, text that visibly is or is
not right, and end tokens that arrive. It is small enough for two processor cores.

## Limits

- It recites the answers of `data/facts.toml`, {facts} in number, and picks one by the words of the question. It
  reasons about nothing, and a question that is worded very differently may get another question's answer.
- It knows no other facts, and no language but English.
- Names are best written in lower case: to "Does callboard support lora?" its answer is right, to "LoRA" it may not be.
- It copies numbers into calls of a calculator, and is sometimes wrong with long ones.
- It knows the *look* of Python: indentation, docstrings, common idioms. It does not know what
  programs mean, and the functions it writes are usually wrong. Do not run them.
- Code that is written greedily often falls into a loop; a temperature of 0.6 to 0.8 reads better there.
- A newline and the indentation after it are usually one token. A prompt that ends right after a
  newline is continued from the split form, which was a fifth of such places late in training only.
- It may repeat passages of the standard library word for word.
- The held-out files were kept out by path; passages they share with training files were not
  removed, which flatters the model and the n-gram alike.

## Data and licence

The training text is the Python standard library as installed with CPython {python}, which is
distributed under the Python Software Foundation License Version 2; some modules carry further
notices of their authors. Left out: installed packages, encoding tables, generated data, files
with very long lines. Library code was seen {repeats} times as often as test code. The chat
examples are functions cut out of the same training files, asked for by name, signature or
docstring. The weights are derived from that text: keep the licence notice with them. Facts, questions and
examinations in `data/` were written for this model.

## Train it again

    python examples/demo_model/train.py --help      Python, from nothing
    python examples/demo_model/teach.py --help      conversations, from the weights in this folder;
                                                    --teacher for Python alone, from a folder of train.py's

`corpus.py` and `chat_examples.py` choose the text, `vocabulary.py` the tokens and the chat template,
`network.py` the shape and the optimizers; `loop.py` and `checkpoint.py` train. `forms.py`, `others.py`, `tools.py` and
`talks.py` make conversations of `data/facts.toml`, `lessons.py` batches of them, `exam.py` examines.
`measure.py`, `baseline.py`, `export.py` and `card.py` produce this folder. It needs `torch`, `transformers`,
`tokenizers`, `safetensors`, `numpy` and `tqdm`. A run limited by `--minutes` depends on the machine's speed;
one limited by `--steps` can be repeated.
"""


@dataclass(frozen=True)
class CardFacts:
    """Everything the card states that had to be counted or measured."""

    parameters: int
    config: dict[str, Any]
    weight_bytes: int
    counts: dict[str, int]
    progress: Progress
    held_out: HeldOut
    baseline: Baseline
    samples: list[Sample]
    marks: dict[str, tuple[int, int]]
    """Kind of question -> (right answers, questions)."""
    python: dict[str, Any]
    """How it was trained before, on Python alone."""


def table(rows: list[tuple[str, str]], head: tuple[str, str]) -> str:
    """A two-column Markdown table."""
    lines = [f"| {head[0]} | {head[1]} |", "|---|---|"]
    return "\n".join([*lines, *(f"| {left} | {right} |" for left, right in rows)]) + "\n"


def describe(facts: CardFacts) -> str:
    """Shape and training in figures."""
    config, now, counts, python = facts.config, facts.progress, facts.counts, facts.python
    sessions = f", in {now.sessions} sessions" if now.sessions > 1 else ""
    rows = [
        ("parameters", f"{facts.parameters:,} (embedding tied with the output layer)"),
        ("weights", f"bf16 safetensors, {facts.weight_bytes:,} bytes"),
        (
            "shape",
            f"{config['num_hidden_layers']} layers, hidden {config['hidden_size']}, "
            f"feed-forward {config['intermediate_size']}, {config['num_attention_heads']} query "
            f"and {config['num_key_value_heads']} key-value heads of {config['head_dim']}",
        ),
        ("vocabulary", f"{config['vocab_size']:,} tokens, byte-level BPE"),
        ("context", f"{config['max_position_embeddings']:,} tokens"),
        (
            "training text",
            f"{counts['train_files']:,} files, {counts['train_bytes'] / 1e6:.1f} MB, and "
            f"{counts['chat_documents']:,} chat examples, {counts['chat_bytes'] / 1e6:.1f} MB",
        ),
        (
            "first, Python alone",
            f"{python['tokens'] / 1e6:.1f} M tokens in {python['steps']:,} steps, {python['minutes']} minutes",
        ),
        ("then conversations", f"{now.tokens / 1e6:.1f} M tokens in {now.step:,} steps, with some of that Python"),
        ("time for that", f"{now.seconds / 60:.1f} minutes on {now.hardware}{sessions}"),
    ]
    notes = "".join(f"\n{note}\n" for note in now.notes)
    return table(rows, ("", "value")) + notes


def examination(facts: CardFacts) -> str:
    """How often the right answer came."""
    rows = [
        (KINDS[kind], f"{right} of {count} ({100 * right / count:.1f} %)")
        for kind, (right, count) in facts.marks.items()
    ]
    counts = facts.counts
    return (
        f"{counts['facts']} facts are taught, asked for in {counts['forms']:,} forms. One form in eight was held out "
        "by a hash of its text before any training. An answer is right if greedy decoding gives exactly the right "
        "words, to the last character, and ends:\n\n" + table(rows, ("asked", "right"))
    )


def results(facts: CardFacts) -> str:
    """The measurements beside the baseline."""
    held_out, baseline = facts.held_out, facts.baseline
    order = baseline.best_order
    bytes_per_token = held_out.bytes / held_out.tokens
    rows = [
        ("**this model**", f"**{held_out.bits_per_byte:.3f}**"),
        (
            f"byte {order}-gram, Witten-Bell interpolated, fitted on the same training files",
            f"{baseline.bits_by_order[order]:.3f}",
        ),
        ("`xz -9e` on the held-out files alone", f"{baseline.xz_bits:.3f}"),
    ]
    positions = [(where, f"{loss:.3f}") for where, loss in held_out.by_position.items()]
    return (
        f"Held-out loss: **{held_out.nats_per_token:.3f} nats per token** over "
        f"{held_out.tokens:,} tokens of {facts.counts['held_out_files']} files "
        f"({held_out.bytes:,} bytes, {bytes_per_token:.2f} per token), which no part of the "
        "training has seen. "
        f"Before it was taught to talk it was {facts.python['nats_per_token']:.3f}.\n\n"
        + table(rows, ("on the held-out files", "bits per byte"))
        + f"\nThe n-gram is the best of orders 1 to {max(baseline.bits_by_order)}. Whether the "
        "whole context is of use, by position in the window:\n\n"
        + table(positions, ("position in tokens", "nats per token"))
    )


def show_sample(sample: Sample) -> str:
    """One sample as a fenced block, with how it ended."""
    ending = "ended by an end token" if sample.stopped else "cut at the length limit"
    text = (sample.prompt + sample.completion).rstrip()
    return f"{sample.title}, {ending}:\n\n```\n{text}\n```\n"


def render(facts: CardFacts) -> str:
    """The whole card."""
    use = USE.format(python=platform.python_version(), repeats=LIBRARY_REPEATS, facts=facts.counts["facts"])
    samples = "\n".join(show_sample(sample) for sample in facts.samples)
    return "\n".join(
        [
            HEADER.format(millions=facts.parameters / 1e6),
            "## Figures\n",
            describe(facts),
            "## Conversation\n",
            examination(facts),
            "## Python\n",
            results(facts),
            "## Samples\n",
            "Taken by the training script, not chosen.\n",
            samples,
            use,
        ]
    )
