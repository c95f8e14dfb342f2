"""Owns the command line of the first training: makes a model of Python from nothing and writes it here.

Run it with `python examples/demo_model/train.py`; `--help` explains the steps.
"""

import argparse
from pathlib import Path

import checkpoint
import numpy as np
import torch
from checkpoint import Progress
from corpus import build_corpus, stdlib_root
from export import export_python
from loop import Budget, train
from network import TINY, Optimizers, Shape, build_model, count_parameters
from vocabulary import prepare

HERE = Path(__file__).resolve().parent
EXPLANATION = """\
Trains a 3.4-million-parameter Qwen3 model on the Python standard library found beside this
interpreter, in three steps; teach.py then teaches it to talk:

  1. prepare   read the sources, split off held-out files, learn a byte-level BPE, pack tokens
  2. train     until --minutes of training time are spent; the learning rate follows the budget,
               so the run always ends with a finished model, on a slow machine with a weaker one
  3. export    weights, tokenizer and configuration into --out-dir, and its held-out loss, which
               the model card compares with that of the model that talks

Steps 1 and 2 keep their results in --work-dir. Run the same command again with --resume to
continue after an interruption: time already spent counts, and steps already done are skipped.
With more --minutes than before, --resume goes on training a finished model for the difference.
"""
EXAMPLES = """\
examples:
  python examples/demo_model/train.py --minutes 40
  python examples/demo_model/train.py --minutes 40 --resume     continue, or only measure again
  python examples/demo_model/train.py --tiny --minutes 0.2 --work-dir /tmp/t --out-dir /tmp/m
                                      smoke test: every step, small, in under a minute

On processor cores shared with other work, set OMP_WAIT_POLICY=PASSIVE: threads that spin while
they wait for a descheduled one can slow training down twentyfold.
"""


def add_run_options(parser: argparse.ArgumentParser) -> None:
    """What is run, and where it is kept."""
    add = parser.add_argument_group("the run").add_argument
    add(
        "--minutes",
        type=float,
        default=40.0,
        help="training time (default 40); steps 1 and 3 take about 5 more",
    )
    add("--steps", type=int, help="train this many steps instead; unlike a time budget, repeatable")
    add(
        "--resume",
        action="store_true",
        help="continue from the checkpoint in --work-dir, if there is one",
    )
    add(
        "--no-export",
        action="store_true",
        help="stop after training; the same command with --resume does the rest later",
    )
    add("--tiny", action="store_true", help="smoke test: a toy network on a few files")
    add(
        "--work-dir",
        type=Path,
        default=HERE.parents[1] / "build" / "demo_model",
        help="token arrays and checkpoints (default: build/demo_model of the repository)",
    )
    add(
        "--out-dir",
        type=Path,
        default=HERE,
        help="where the model is written (default: this folder)",
    )


def add_training_options(parser: argparse.ArgumentParser) -> None:
    """How it is trained; the defaults are those of the shipped model."""
    add = parser.add_argument_group("training").add_argument
    add(
        "--seed",
        type=int,
        default=0,
        help="fixes initialisation, document order and chat questions (default 0)",
    )
    add("--device", default="auto", help="auto (a GPU when there is one), cpu, cuda (default auto)")
    add("--threads", type=int, help="CPU threads (default: torch's choice)")
    add(
        "--tokens-per-step",
        type=int,
        default=4096,
        help="batch size in tokens, a multiple of 2048 (default 4096)",
    )
    add(
        "--matrix-lr",
        type=float,
        default=0.02,
        help="peak learning rate of Muon, for matrices (default 0.02)",
    )
    add(
        "--embedding-lr",
        type=float,
        default=0.003,
        help="peak learning rate of AdamW, for the rest (default 0.003)",
    )


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=EXPLANATION,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_run_options(parser)
    add_training_options(parser)
    arguments = parser.parse_args()
    if arguments.tokens_per_step % Shape().max_position_embeddings:
        parser.error("--tokens-per-step must be a multiple of 2048")
    if arguments.tiny and arguments.out_dir == HERE:
        parser.error("--tiny would overwrite the shipped model; give another --out-dir")
    return arguments


def main() -> None:
    """Prepare, train, export."""
    arguments = parse_arguments()
    work_dir: Path = arguments.work_dir
    work_dir.mkdir(parents=True, exist_ok=True)
    torch.set_float32_matmul_precision("high")
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    name = arguments.device
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    shape = TINY if arguments.tiny else Shape()

    corpus = build_corpus(stdlib_root(), arguments.seed, limit_files=60 if arguments.tiny else None)
    found = checkpoint.find(work_dir) if arguments.resume else None
    if found is None:
        counts = prepare(corpus, work_dir, shape.vocab_size, arguments.seed)
        print(f"prepared {counts['stream_tokens']:,} tokens from {counts['train_files']:,} files")

    model = build_model(shape, arguments.seed).to(torch.device(name))
    optimizers = Optimizers(model, arguments.matrix_lr, arguments.embedding_lr)
    now = Progress()
    if found is not None:
        now = checkpoint.load(found, model, optimizers)
        print(f"resuming at step {now.step:,}, {now.seconds / 60:.1f} minutes spent")
    print(f"{count_parameters(model):,} parameters on {name}")
    stream = np.load(work_dir / "train.npy", mmap_mode="r")
    budget = Budget(arguments.minutes, arguments.steps, arguments.tokens_per_step)
    if budget.fraction(now) < 1.0:
        train(model, optimizers, stream, budget, now, work_dir)
    if not arguments.no_export:
        export_python(model, corpus.held_out, now, work_dir, arguments.out_dir)


if __name__ == "__main__":
    main()
