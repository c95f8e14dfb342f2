"""Owns the command line of the second training: teaches the model of Python in this folder to talk about callboard.

Run it with `python examples/demo_model/teach.py`; `--help` explains the steps.
"""

import argparse
import random
import time
from collections.abc import Iterator
from pathlib import Path

import checkpoint
import numpy as np
import torch
from checkpoint import Progress
from corpus import Corpus, build_corpus, stdlib_root
from exam import examination, marks, passed
from export import export
from forms import Fact, read_facts
from lessons import IGNORED, batches
from loop import describe_hardware
from network import Optimizers, Shape, build_model, lr_scale
from talks import Probe, Talks
from tokenizers import Tokenizer
from torch.nn.functional import cross_entropy
from tqdm import tqdm
from transformers import Qwen3ForCausalLM
from vocabulary import Tokens, pack_training_stream

HERE = Path(__file__).resolve().parent
EXPLANATION = """\
Continues from the weights in this folder, which train.py has made of Python alone, in three steps:

  1. train     conversations made of data/facts.toml, and some Python so that it is not forgotten,
               until --minutes are spent; the learning rate follows the budget
  2. examine   questions that were held out before any training, held-out Python
  3. export    weights, tokenizer, configuration and model card into --out-dir

With --resume it continues from the checkpoint in --work-dir; with more --minutes than before, it goes
on training for the difference.  One thread is the fastest on cores that are shared: OMP_NUM_THREADS=1.
"""
CODE_EVERY = 2
LONG_EVERY = 16
"""Every second step also reads Python, every sixteenth the whole context of it."""
EXAMINE_EVERY = 300
CHECKPOINT_SECONDS = 120.0


def parse_arguments() -> argparse.Namespace:
    """The command line; the defaults are those of the shipped model."""
    parser = argparse.ArgumentParser(description=EXPLANATION, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--minutes", type=float, default=60.0, help="training time (default 60)")
    add("--resume", action="store_true", help="continue from the checkpoint in --work-dir")
    add(
        "--no-export",
        action="store_true",
        help="stop after training; the same command with --resume does the rest later",
    )
    add("--note", help="a remark on how this run went, kept with it and shown in the card")
    add("--seed", type=int, default=0, help="fixes the order of conversations and of Python (default 0)")
    add("--tokens-per-step", type=int, default=2048, help="tokens of conversations in a step (default 2048)")
    add("--code-tokens", type=int, default=768, help="tokens of Python in every second step (default 768)")
    add("--matrix-lr", type=float, default=0.005, help="peak learning rate of Muon (default 0.005)")
    add("--embedding-lr", type=float, default=0.0007, help="peak learning rate of AdamW (default 0.0007)")
    add("--work-dir", type=Path, default=HERE.parents[1] / "build" / "demo_model_talks", help="checkpoints")
    add("--out-dir", type=Path, default=HERE, help="where the model is written (default: this folder)")
    return parser.parse_args()


def code_stream(tokenizer: Tokenizer, work_dir: Path, seed: int) -> Tokens:
    """The training files as one stream of tokens, kept in `work_dir`."""
    kept = work_dir / "train.npy"
    if not kept.exists():
        np.save(kept, pack_training_stream(tokenizer, build_corpus(stdlib_root(), seed), seed))
    stream: Tokens = np.load(kept, mmap_mode="r")
    return stream


def stretch(stream: Tokens, step: int, window: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The step's piece of the stream as (inputs, targets); a prime number of pieces lies between one and the next."""
    start = (step * 7919 * window) % (len(stream) - window - 1)
    piece = torch.from_numpy(stream[start : start + window + 1].astype(np.int64))
    return piece[None, :-1], piece[None, 1:]


def summed_loss(model: Qwen3ForCausalLM, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The sum of the losses of what is taught; nothing else passes the output layer."""
    hidden = model.model(input_ids=inputs, use_cache=False).last_hidden_state
    taught = targets != IGNORED
    return cross_entropy(model.lm_head(hidden[taught]).float(), targets[taught], reduction="sum")


def train_step(
    model: Qwen3ForCausalLM,
    chat: tuple[torch.Tensor, torch.Tensor],
    code: tuple[torch.Tensor, torch.Tensor] | None,
    weight: int,
) -> float:
    """Gradients of one step; returns the loss per token of the conversations.

    weight: how many tokens the Python counts for, however many there are."""
    taught = int((chat[1] != IGNORED).sum())
    with torch.autocast(chat[0].device.type, torch.bfloat16):
        told = total = summed_loss(model, *chat)
        if code is not None:
            total = told + summed_loss(model, *code) * (weight / code[1].numel())
    torch.autograd.backward(total / (taught + weight))
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    return float(told.detach()) / taught


class Lessons:
    """One run of training: what it reads, and how far it has come."""

    def __init__(self, arguments: argparse.Namespace, tokenizer: Tokenizer, stream: Tokens, facts: list[Fact]) -> None:
        """Load the weights that were there before, or the checkpoint."""
        self.arguments = arguments
        self._tokenizer = tokenizer
        self._stream = stream
        self.model = build_model(Shape(), arguments.seed)
        self._optimizers = Optimizers(self.model, arguments.matrix_lr, arguments.embedding_lr)
        self.now = Progress()
        found = checkpoint.find(arguments.work_dir) if arguments.resume else None
        if found is None:
            checkpoint.load_weights(HERE, self.model)
        else:
            self.now = checkpoint.load(found, self.model, self._optimizers)
        if arguments.note:
            self.now.notes.append(arguments.note)
        seed = arguments.seed + 1000 + self.now.step
        self._chats: Iterator[tuple[torch.Tensor, torch.Tensor]] = batches(
            tokenizer, Talks(facts, random.Random(seed)), arguments.tokens_per_step, random.Random(seed)
        )

    def train(self, probes: list[Probe]) -> None:
        """Train until the budget is spent; examine with `probes` now and then."""
        now, budget = self.now, self.arguments.minutes * 60
        if now.seconds >= budget:
            return
        now.hardware = describe_hardware(torch.device("cpu"))
        now.sessions += 1
        self.model.train()
        saved = now.seconds
        bar = tqdm(total=budget, initial=now.seconds, bar_format="{l_bar}{bar}| {elapsed}{postfix}", mininterval=20)
        while now.seconds < budget:
            started = time.monotonic()
            loss = self._step(now.seconds / budget)
            spent = time.monotonic() - started
            now.seconds += spent
            now.train_loss += (loss - now.train_loss) * max(0.02, 1 / now.step)
            bar.set_postfix_str(f"loss {now.train_loss:.3f}, {now.tokens / 1e6:.2f} M tokens", refresh=False)
            bar.update(spent)
            if now.step % EXAMINE_EVERY == 0:
                self.model.eval()
                tqdm.write(f"{now.step}: {marks(probes, passed(self.model, self._tokenizer, probes))}")
                self.model.train()
            if now.seconds - saved > CHECKPOINT_SECONDS:
                checkpoint.save(self.arguments.work_dir, self.model, self._optimizers, now)
                saved = now.seconds
        bar.close()
        checkpoint.save(self.arguments.work_dir, self.model, self._optimizers, now)

    def _step(self, progress: float) -> float:
        now, weight = self.now, self.arguments.code_tokens
        chat = next(self._chats)
        code = None
        if now.step % CODE_EVERY == 0:
            whole = now.step % LONG_EVERY == 0
            code = stretch(self._stream, now.step, self.model.config.max_position_embeddings if whole else weight)
            now.tokens += code[0].numel()
        loss = train_step(self.model, chat, code, weight)
        self._optimizers.step(lr_scale(progress))
        now.tokens += chat[0].numel()
        now.step += 1
        return loss


def counted(corpus: Corpus, stream: Tokens, facts: list[Fact]) -> dict[str, int]:
    """What the card says of the text."""
    return {
        "train_files": len(corpus.train),
        "held_out_files": len(corpus.held_out),
        "train_bytes": corpus.train_bytes(),
        "chat_documents": len(corpus.chats),
        "chat_bytes": sum(len(chat.encode()) for chat in corpus.chats),
        "stream_tokens": int(stream.size),
        "facts": len(facts),
        "forms": sum(len(fact.asked) + len(fact.held_out) for fact in facts),
    }


def main() -> None:
    """Train, examine, export."""
    arguments = parse_arguments()
    work_dir: Path = arguments.work_dir
    work_dir.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer.from_file(str(HERE / "tokenizer.json"))
    tokenizer.save(str(work_dir / "tokenizer.json"))
    stream = code_stream(tokenizer, work_dir, arguments.seed)
    facts = read_facts()
    lessons = Lessons(arguments, tokenizer, stream, facts)
    probes = examination(Talks(facts, random.Random(1)))
    lessons.train(random.Random(2).sample(probes, 200))
    if not arguments.no_export:
        corpus = build_corpus(stdlib_root(), arguments.seed)
        counts = counted(corpus, stream, facts)
        export(lessons.model, corpus, counts, lessons.now, work_dir, arguments.out_dir, arguments.seed)


if __name__ == "__main__":
    main()
