"""Owns the network and its optimizers: the shape, the parameter groups and the learning rates."""

from dataclasses import asdict, dataclass

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM


@dataclass(frozen=True)
class Shape:
    """The sizes of a Qwen3 network. The default is the one shipped in this folder."""

    vocab_size: int = 3072
    hidden_size: int = 256
    intermediate_size: int = 432
    num_hidden_layers: int = 5
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 64
    max_position_embeddings: int = 2048


TINY = Shape(
    vocab_size=512,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=32,
)
"""The shape of the smoke test."""


def build_model(shape: Shape, seed: int) -> Qwen3ForCausalLM:
    """A freshly initialised network with tied embeddings."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        **asdict(shape),
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=[2, 0],
        pad_token_id=0,
    )
    return Qwen3ForCausalLM(config)


def count_parameters(model: Qwen3ForCausalLM) -> int:
    """Parameters, the tied embedding counted once."""
    return sum(parameter.numel() for parameter in model.parameters())


class Optimizers:
    """Muon for the matrices inside the layers, AdamW for the embedding and the norms.

    Muon is known for how much small models learn from each token, which is what counts when the
    whole run is an hour on a small processor; it does not suit embeddings or vectors.
    """

    def __init__(self, model: Qwen3ForCausalLM, matrix_lr: float, embedding_lr: float) -> None:
        """Sort the parameters of `model` between the two."""
        named = list(model.named_parameters())
        matrices = [p for name, p in named if p.ndim == 2 and "embed" not in name]
        embeddings = [p for name, p in named if p.ndim == 2 and "embed" in name]
        vectors = [p for _, p in named if p.ndim < 2]
        self._all: dict[str, torch.optim.Optimizer] = {
            "muon": torch.optim.Muon(matrices, lr=matrix_lr, momentum=0.95, weight_decay=0.05),
            "adamw": torch.optim.AdamW(
                [
                    {"params": embeddings, "weight_decay": 0.01},
                    {"params": vectors, "weight_decay": 0.0},
                ],
                lr=embedding_lr,
                betas=(0.9, 0.95),
            ),
        }
        self._base = {"muon": matrix_lr, "adamw": embedding_lr}

    def step(self, lr_scale: float) -> None:
        """Apply the gradients with every learning rate scaled by `lr_scale`, then clear them."""
        for name, optimizer in self._all.items():
            for group in optimizer.param_groups:
                group["lr"] = self._base[name] * lr_scale
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    def tensors(self) -> dict[str, torch.Tensor]:
        """The optimizers' state as flat names, fit for safetensors."""
        flat: dict[str, torch.Tensor] = {}
        for name, optimizer in self._all.items():
            for index, state in optimizer.state_dict()["state"].items():
                for key, value in state.items():
                    flat[f"{name}/{index}/{key}"] = torch.as_tensor(value).contiguous()
        return flat

    def load_tensors(self, flat: dict[str, torch.Tensor]) -> None:
        """Restore what `tensors` returned."""
        for name, optimizer in self._all.items():
            state: dict[int, dict[str, torch.Tensor]] = {}
            for path, value in flat.items():
                owner, index, key = path.split("/")
                if owner == name:
                    state.setdefault(int(index), {})[key] = value
            groups = optimizer.state_dict()["param_groups"]
            optimizer.load_state_dict({"state": state, "param_groups": groups})


def lr_scale(progress: float) -> float:
    """Warm up over 2 % of the budget, hold, then fall linearly to 0 over the last 55 %."""
    if progress < 0.02:
        return max(progress / 0.02, 0.02)
    return min(1.0, max(0.0, (1.0 - progress) / 0.55))


def window_length(progress: float, longest: int) -> int:
    """Context during training: short while most is learnt locally, the full one at the end."""
    if progress < 0.6:
        return longest // 4
    return longest // 2 if progress < 0.87 else longest
