"""The layouts of published checkpoints where transformers saves another one that only it reads."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

Tensors = dict[str, Tensor]


def publish_as(family: str, model: PreTrainedModel) -> None:
    """Let ``save_pretrained`` of the model write the published layout, in one file."""
    if family not in LAYOUTS:
        return
    save = model.save_pretrained

    def publish(directory: Path, **options: Any) -> None:
        save(directory, **options)
        files = sorted(Path(directory).glob("model*.safetensors*"))
        tensors = {name: one for file in files if file.suffix != ".json" for name, one in load_file(file).items()}
        for file in files:
            file.unlink()
        published = {name: one.contiguous() for name, one in LAYOUTS[family](tensors).items()}
        save_file(published, Path(directory) / "model.safetensors", metadata={"format": "pt"})

    model.save_pretrained = publish


def olmo_hybrid(tensors: Tensors) -> Tensors:
    """Convolutions as wide as q, k and v, not a third of all each; norms of attention under their own names."""
    renamed = {}
    for name, tensor in tensors.items():
        layer, _, part = name.partition(".feedforward_layer_norm.")
        attends = bool(part) and f"{layer}.self_attn.q_proj.weight" in tensors
        renamed[f"{layer}.post_attention_layernorm.{part}" if attends else name] = tensor
    return with_convolutions(renamed)


def with_convolutions(tensors: Tensors) -> Tensors:
    """Cut the convolutions of q, k and v where their products end."""
    for name in [one for one in tensors if one.endswith(".q_conv1d.weight")]:
        names = [name.replace(".q_", f".{side}_") for side in "qkv"]
        sizes = [len(tensors[one.replace("conv1d", "proj")]) for one in names]
        whole = torch.cat([tensors[one] for one in names])
        tensors |= dict(zip(names, whole.split(sizes), strict=True))
    return tensors


LAYOUTS: dict[str, Callable[[Tensors], Tensors]] = {"OlmoHybrid": olmo_hybrid}
