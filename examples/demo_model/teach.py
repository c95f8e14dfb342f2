"""Owns the command line of the second training: teaches the model of Python in this folder to talk about callboard.

Run it with `python examples/demo_model/teach.py`; `--help` explains the steps.
"""

import argparse
import random
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import checkpoint
import numpy as np
import torch
from checkpoint import Progress
from corpus import Corpus, SourceFile, build_corpus, stdlib_root
from exam import examination, marks, passed
from export import export
from forms import Fact, read_facts
from lessons import IGNORED, batches
from loop import describe_hardware
from measure import measure_held_out
from network import Optimizers, Shape, build_model, lr_scale
from talks import Probe, Talks
from tokenizers import Tokenizer
from torch.nn.functional import cross_entropy
from tqdm import tqdm
from transformers import Qwen3ForCausalLM
from vocabulary import Tokens, pack_training_stream

HERE = Path(__file__).resolve().parent
EXPLANATION = """\
Continues from the weights in this folder in three steps.  They may be those that train.py has made of Python alone,
or have been taught by this script before; then --teacher names a folder with those of Python alone.

  1. train     conversations made of data/facts.toml, and Python so that it is not forgotten: what is written
               and what the weights of before expected there; until --minutes are spent
  2. examine   questions that were held out before any training, held-out Python
  3. export    weights, tokenizer, configuration and model card into --out-dir

With --resume it continues from the checkpoint in --work-dir; with more --minutes than before, it goes
on training for the difference.  One thread is the fastest on cores that are shared: OMP_NUM_THREADS=1.
"""
CODE_PIECES = (4, 512)
LONG_EVERY = 8
"""Every step also reads pieces of Python; every eighth step reads one piece that is the whole context."""
TEACHER_SHARE = 0.75
"""How much of the target behind a token of Python is what the teacher expects; the rest is what is written."""
EXAMINE_EVERY = 300
CHECKPOINT_SECONDS = 120.0


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=EXPLANATION, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--minutes", type=float, default=60.0, help="training time (default 60)")
    add("--resume", action="store_true", help="continue from the checkpoint in --work-dir")
    add(
        "--no-export",
        action="store_true",
        help="stop after training; the same command with --resume does the rest later",
    )
    add("--teacher", type=Path, default=HERE, help="folder with the model of Python alone (default: this folder)")
    add("--note", help="a remark on how this run went, kept with it and shown in the card")
    add("--seed", type=int, default=0, help="fixes the order of conversations and of Python (default 0)")
    add("--tokens-per-step", type=int, default=768, help="tokens of conversations in a step (default 768)")
    add("--code-weight", type=int, default=768, help="tokens that the Python of a step counts for (default 768)")
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


def pieces(stream: Tokens, step: int, count: int, window: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The step's pieces of the stream as (inputs, targets); a prime number of pieces lies between one and the next."""
    starts = [((step * count + row) * 7919 * window) % (len(stream) - window - 1) for row in range(count)]
    rows = torch.from_numpy(np.stack([stream[start : start + window + 1] for start in starts]).astype(np.int64))
    return rows[:, :-1], rows[:, 1:]


def summed_loss(model: Qwen3ForCausalLM, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The sum of the losses of what is taught; nothing else passes the output layer."""
    hidden = model.model(input_ids=inputs, use_cache=False).last_hidden_state
    taught = targets != IGNORED
    return cross_entropy(model.lm_head(hidden[taught]).float(), targets[taught], reduction="sum")


def code_loss(
    model: Qwen3ForCausalLM, teacher: Qwen3ForCausalLM, inputs: torch.Tensor, targets: torch.Tensor
) -> torch.Tensor:
    """The mean loss of the Python, against what is written and what the teacher expects there."""
    scores = model(input_ids=inputs, use_cache=False).logits.float().flatten(0, 1)
    with torch.no_grad():
        expected = teacher(input_ids=inputs, use_cache=False).logits.float().flatten(0, 1).softmax(-1)
    written = cross_entropy(scores, targets.flatten())
    return (1 - TEACHER_SHARE) * written + TEACHER_SHARE * cross_entropy(scores, expected)


def train_step(
    model: Qwen3ForCausalLM,
    teacher: Qwen3ForCausalLM,
    chat: tuple[torch.Tensor, torch.Tensor],
    code: tuple[torch.Tensor, torch.Tensor],
    weight: int,
) -> float:
    """Gradients of one step; returns the loss per token of the conversations.

    weight: how many tokens the Python counts for, however many there are."""
    taught = int((chat[1] != IGNORED).sum())
    with torch.autocast(chat[0].device.type, torch.bfloat16):
        told = summed_loss(model, *chat)
        total = told + code_loss(model, teacher, *code) * weight
    torch.autograd.backward(total / (taught + weight))
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    return float(told.detach()) / taught


def python_teacher(work_dir: Path, source: Path) -> Qwen3ForCausalLM:
    """The model of Python alone, as it was in `source` when the run began; `work_dir` keeps it."""
    kept = work_dir / "python"
    if not kept.exists():
        kept.mkdir()
        shutil.copy(source / "model.safetensors", kept)
    teacher = build_model(Shape(), 0)
    checkpoint.load_weights(kept, teacher)
    return teacher.eval().requires_grad_(False)


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
        self._teacher = python_teacher(arguments.work_dir, arguments.teacher)
        if arguments.note:
            self.now.notes.append(arguments.note)
        seed = arguments.seed + 1000 + self.now.step
        self._chats: Iterator[tuple[torch.Tensor, torch.Tensor]] = batches(
            tokenizer, Talks(facts, random.Random(seed)), arguments.tokens_per_step, random.Random(seed)
        )

    def train(self, probes: list[Probe], held_out: list[SourceFile]) -> None:
        """Train until the budget is spent; examine with `probes`, and with files of Python, now and then."""
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
                python = measure_held_out(self.model, self._tokenizer, held_out).nats_per_token
                graded = marks(probes, passed(self.model, self._tokenizer, probes))
                tqdm.write(f"{now.step}: Python {python:.3f} nats per token, {graded}")
                self.model.train()
            if now.seconds - saved > CHECKPOINT_SECONDS:
                checkpoint.save(self.arguments.work_dir, self.model, self._optimizers, now)
                saved = now.seconds
        bar.close()
        checkpoint.save(self.arguments.work_dir, self.model, self._optimizers, now)

    def _step(self, progress: float) -> float:
        now = self.now
        chat = next(self._chats)
        whole = now.step % LONG_EVERY == 0
        shape = (1, self.model.config.max_position_embeddings) if whole else CODE_PIECES
        code = pieces(self._stream, now.step, *shape)
        loss = train_step(self.model, self._teacher, chat, code, self.arguments.code_weight)
        self._optimizers.step(lr_scale(progress))
        now.tokens += chat[0].numel() + code[0].numel()
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
    corpus = build_corpus(stdlib_root(), arguments.seed)
    lessons.train(random.Random(2).sample(probes, 400), corpus.held_out[::8])
    if not arguments.no_export:
        counts = counted(corpus, stream, facts)
        export(lessons.model, corpus, counts, lessons.now, work_dir, arguments.out_dir, arguments.seed)


if __name__ == "__main__":
    main()
