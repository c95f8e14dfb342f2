"""Owns what a run keeps on disk so that it can continue: safetensors and JSON, never pickles."""

import json
import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path

from network import Optimizers
from safetensors.torch import load_file, save_file
from transformers import Qwen3ForCausalLM


@dataclass
class Progress:
    """How far a run has come."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    train_loss: float = 0.0
    sessions: int = 0
    hardware: str = ""
    notes: list[str] = field(default_factory=list)
    """Remarks on how the run went, shown in the card."""
    curve: list[tuple[int, float]] = field(default_factory=list)
    """(tokens seen, smoothed training loss) now and then."""


def save(work_dir: Path, model: Qwen3ForCausalLM, optimizers: Optimizers, now: Progress) -> None:
    """Write the checkpoint beside the old one, then swap, so that a kill leaves one intact."""
    fresh, final = work_dir / "checkpoint.new", work_dir / "checkpoint"
    old = work_dir / "checkpoint.old"
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(parents=True)
    weights = {name: p.detach().contiguous() for name, p in model.named_parameters()}
    save_file(weights, fresh / "model.safetensors")
    save_file(optimizers.tensors(), fresh / "optimizers.safetensors")
    (fresh / "progress.json").write_text(json.dumps(asdict(now)) + "\n")
    shutil.rmtree(old, ignore_errors=True)
    if final.exists():
        final.rename(old)
    fresh.rename(final)
    shutil.rmtree(old, ignore_errors=True)


def find(work_dir: Path) -> Path | None:
    """The last complete checkpoint, if the run left one."""
    for name in ("checkpoint", "checkpoint.old"):
        if (work_dir / name / "progress.json").exists():
            return work_dir / name
    return None


def load_weights(folder: Path, model: Qwen3ForCausalLM) -> None:
    """Load the weights; the output layer is tied, so its absence is the only one accepted."""
    missing, unexpected = model.load_state_dict(load_file(folder / "model.safetensors"), strict=False)
    if unexpected or set(missing) - {"lm_head.weight"}:
        raise ValueError(f"{folder} does not fit this shape; use another --work-dir")


def load(folder: Path, model: Qwen3ForCausalLM, optimizers: Optimizers) -> Progress:
    """Restore weights, optimizers and progress."""
    load_weights(folder, model)
    optimizers.load_tensors(load_file(folder / "optimizers.safetensors"))
    values = json.loads((folder / "progress.json").read_text())
    values["curve"] = [(int(tokens), float(loss)) for tokens, loss in values["curve"]]
    return Progress(**values)
