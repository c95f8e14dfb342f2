"""Owns the training loop: batches, schedule by budget, progress bar, periodic checkpoints."""

import os
import platform
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import checkpoint
import numpy as np
import torch
from checkpoint import Progress
from network import Optimizers, lr_scale, window_length
from tqdm import tqdm
from transformers import Qwen3ForCausalLM
from vocabulary import Tokens


@dataclass(frozen=True)
class Budget:
    """How long a run may last: in minutes of training time, or in steps when given."""

    minutes: float
    steps: int | None
    tokens_per_step: int
    checkpoint_seconds: float = 120.0

    def fraction(self, now: Progress) -> float:
        """The share of the budget spent; everything scheduled depends on it alone."""
        if self.steps is not None:
            return now.step / self.steps
        return now.seconds / (self.minutes * 60)


def describe_hardware(device: torch.device) -> str:
    """What trained the model, in words fit for a model card."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{os.cpu_count()} CPU cores ({platform.machine()}), no GPU"


def take_batch(
    stream: Tokens, step: int, budget: Budget, window: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """The step's stretch of the stream as (inputs, targets); the stream wraps around.

    The position is a function of the step alone, so a resumed run continues where it stopped.
    """
    size = budget.tokens_per_step
    positions = (np.arange(size + 1) + step * size) % len(stream)
    flat = torch.from_numpy(stream[positions].astype(np.int64)).to(device)
    return flat[:-1].view(-1, window), flat[1:].view(-1, window)


def train_step(model: Qwen3ForCausalLM, inputs: torch.Tensor, targets: torch.Tensor) -> float:
    """One forward and backward pass in bf16 autocast; returns the loss."""
    with torch.autocast(inputs.device.type, torch.bfloat16):
        logits = model(input_ids=inputs, use_cache=False).logits
    loss = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
    torch.autograd.backward(loss)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    value = float(loss.detach())
    if not np.isfinite(value):
        raise FloatingPointError("the loss is no longer finite; lower --matrix-lr")
    return value


def progress_bar(budget: Budget, now: Progress) -> "tqdm[None]":
    """A bar over the budget in per cent, so that its ETA holds when the machine is shared."""
    return tqdm(
        total=100.0,
        initial=round(100 * budget.fraction(now), 2),
        bar_format="{l_bar}{bar}| {elapsed}{postfix}",
        desc="training",
        mininterval=1.0 if sys.stderr.isatty() else 20.0,
    )


def train(
    model: Qwen3ForCausalLM,
    optimizers: Optimizers,
    stream: Tokens,
    budget: Budget,
    now: Progress,
    work_dir: Path,
) -> None:
    """Train until the budget is spent, keeping `now` up to date."""
    device = next(model.parameters()).device
    now.hardware = describe_hardware(device)
    now.sessions += 1
    model.train()
    longest = model.config.max_position_embeddings
    last_save = now.seconds
    bar = progress_bar(budget, now)
    while (fraction := budget.fraction(now)) < 1.0:
        started = time.monotonic()
        window = window_length(fraction, longest)
        inputs, targets = take_batch(stream, now.step, budget, window, device)
        loss = train_step(model, inputs, targets)
        optimizers.step(lr_scale(fraction))
        seconds = time.monotonic() - started
        now.step += 1
        now.tokens += inputs.numel()
        now.seconds += seconds
        now.train_loss += (loss - now.train_loss) * max(0.02, 1 / now.step)
        if now.step % 50 == 0:
            now.curve.append((now.tokens, round(now.train_loss, 4)))
        spent = min(budget.fraction(now), 1.0)
        left = now.seconds * (1 - spent) / spent
        bar.set_postfix_str(
            f"loss {now.train_loss:.3f}, {inputs.numel() / seconds:,.0f} tokens/s, "
            f"{now.tokens / 1e6:.2f} M tokens, ETA {left / 60:.1f} min",
            refresh=False,
        )
        bar.update(100 * spent - bar.n)
        if now.seconds - last_save >= budget.checkpoint_seconds:
            checkpoint.save(work_dir, model, optimizers, now)
            last_save = now.seconds
    bar.close()
    checkpoint.save(work_dir, model, optimizers, now)
