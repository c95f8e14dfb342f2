"""GRPO (Shao et al. 2024) on what a live server draws, with log probabilities that differ by 0.

    python examples/grpo/train.py                        # 200 updates against a server that is paused and killed
    python examples/grpo/train.py --offline --json offline.json    # the same curve, to the bit, without a server

The reward of an answer is its share of tokens that have a line break: what the model learns is to write short lines.
Each update samples 8 answers to each of 4 prompts, takes one step of Adam, and gives the sampler the new weights.
"""

import argparse
import json
import shutil
import tempfile
from pathlib import Path

import torch
from sampling import DRAWN_BY, Answer, Offline, Server
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from callboard.training import TrainedModel, log_probs

MODEL = Path(__file__).parents[1] / "demo_model"
PROMPTS = ["def add(a, b):", "class Stack:", "import os", "for item in items:"]
GROUP = 8
TABLES = {"model": {"dtype": "float32"}}


def advantages(rewards: torch.Tensor) -> torch.Tensor:
    """Return each answer's advantage over the others of its group."""
    groups = rewards.view(-1, GROUP)
    return ((groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)).flatten()


def apart(found: list[torch.Tensor], answers: list[Answer]) -> float:
    """Return the mean absolute difference between what the trainer computes and what the sampler reported."""
    drawn = torch.cat([torch.tensor(reported) for _, reported in answers])
    return float((torch.cat(found).detach() - drawn).abs().mean())


def train(sampler: Server | Offline, updates: int) -> list[dict[str, float]]:
    """Return reward and difference of each update."""
    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    prompts = [tokenizer.encode(text).ids for text in PROMPTS for _ in range(GROUP)]
    breaks = torch.tensor(["\n" in tokenizer.decode([token_id]) for token_id in range(tokenizer.get_vocab_size())])
    model = TrainedModel(AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32), TABLES)
    optimizer = torch.optim.Adam(model.module.parameters(), lr=3e-5)
    curve = []
    for update in range(updates):
        seeds = [1000 * update + number for number in range(len(prompts))]
        answers = sampler.sample(prompts, seeds, disturb=update == updates // 2)
        rewards = torch.stack([breaks[token_ids].float().mean() for token_ids, _ in answers])
        sequences = [prompt + token_ids for prompt, (token_ids, _) in zip(prompts, answers, strict=True)]
        scored = log_probs(model, sequences, DRAWN_BY)
        found = [one[-len(token_ids) :] for one, (token_ids, _) in zip(scored, answers, strict=True)]
        means = torch.stack([one.mean() for one in found])
        optimizer.zero_grad()
        (-(advantages(rewards) * means).mean()).backward()
        optimizer.step()
        folder = sampler.weights / f"{update:04}"
        model.module.save_pretrained(folder)
        sampler.update(folder, str(update))
        if update:
            shutil.rmtree(sampler.weights / f"{update - 1:04}")
        curve.append({"reward": float(rewards.mean()), "apart": apart(found, answers)})
        print(f"update {update:3}: reward {curve[-1]['reward']:.4f}, log probabilities differ by {curve[-1]['apart']}")
    model.close()
    return curve


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=200)
    parser.add_argument("--offline", action="store_true", help="sample in this process, undisturbed")
    parser.add_argument("--json", type=Path, help="write reward and difference of each update there")
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # small operations: threads of one would wait for each other beside the server
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    with (
        tempfile.TemporaryDirectory() as folder,
        (Offline if arguments.offline else Server)(MODEL, Path(folder)) as sampler,
    ):
        curve = train(sampler, arguments.updates)
    if arguments.json:
        arguments.json.write_text(json.dumps(curve))
    print(f"largest difference of log probabilities: {max(one['apart'] for one in curve)}")


if __name__ == "__main__":
    main()
