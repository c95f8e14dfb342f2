"""Adapters of random numbers, as PEFT saves them, and the reference with their products added to its weights."""

import copy
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import PreTrainedModel

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
MERGED = ("qkv_proj", "gate_up_proj")
CONFIG = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "use_rslora": False, "bias": "none", "task_type": "CAUSAL_LM"}


def make_adapter(
    folder: Path,
    reference: PreTrainedModel,
    seed: int,
    *,
    rank: int = 4,
    targets: Sequence[str] = ALL,
    ranks: dict[str, int] | None = None,
    scale: float = 0.3,
    **config: Any,
) -> Path:
    """Write an adapter of random numbers.

    ranks: of modules by the end of their names, where they have another.  config: what the file says beside."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, module in reference.named_modules():
        end = name.rpartition(".")[2]
        if isinstance(module, nn.Linear) and end in targets and name != "lm_head":
            own = (ranks or {}).get(end, rank)
            tensors[f"base_model.model.{name}.lora_A.weight"] = torch.randn(
                own, module.in_features, generator=generator
            )
            tensors[f"base_model.model.{name}.lora_B.weight"] = (
                torch.randn(module.out_features, own, generator=generator) * scale / math.sqrt(module.in_features)
            )
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    said = {
        **CONFIG,
        "r": rank,
        "target_modules": list(targets),
        **({"rank_pattern": ranks} if ranks else {}),
        **config,
    }
    (folder / "adapter_config.json").write_text(json.dumps(said))
    return folder


def merged(reference: PreTrainedModel, folder: Path) -> PreTrainedModel:
    """The reference with the adapter in its weights, in float64 arithmetic."""
    config, tensors = (
        json.loads((folder / "adapter_config.json").read_text()),
        load_file(folder / "adapter_model.safetensors"),
    )
    model = copy.deepcopy(reference)
    for name, module in model.named_modules():
        a = tensors.get(f"base_model.model.{name}.lora_A.weight")
        if a is not None and isinstance(module, nn.Linear):
            b = tensors[f"base_model.model.{name}.lora_B.weight"]
            end = name.rpartition(".")[2]
            alpha = config.get("alpha_pattern", {}).get(end, config["lora_alpha"])
            scale = alpha / (math.sqrt(len(a)) if config["use_rslora"] else len(a))
            module.weight.data = (module.weight.double() + scale * (b.double() @ a.double())).float()
    return model


def greedy(model: PreTrainedModel, prompt: list[int], count: int) -> list[int]:
    """Return the tokens that the reference generates behind a prompt."""
    ids = torch.tensor([prompt])
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=count,
        eos_token_id=None,
        pad_token_id=0,
    )
    said: list[int] = out[0, len(prompt) :].tolist()
    return said
