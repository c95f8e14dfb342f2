"""The decoder once more in float64, one matrix after the other: what both float32 implementations are rounded from.

Legend: T tokens · N query heads · H head size
Owns: the formulas, as papers write them.  Rotary frequencies are float32 numbers, as checkpoints mean them.
"""

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from engine.checkpoints.shape import DecoderShape
from engine.models.frequencies import frequencies

ACTIVATIONS = {"silu": F.silu, "gelu": F.gelu, "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh")}


def exact_logprobs(shape: DecoderShape, weights: dict[str, Tensor], tokens: list[int]) -> Tensor:
    """Log probabilities [T, V] of a sequence, float64."""
    weights = {name: one.double() for name, one in weights.items()}
    count = len(tokens)
    attention = shape.layers[0].attention
    rotary, eps = attention.rotary, shape.norm.eps
    angles = torch.arange(count)[:, None] * frequencies(rotary, shape.head_size).double()
    cos, sin = (torch.cat((one, one), -1)[:, None] * rotary.attention_factor for one in (angles.cos(), angles.sin()))
    distance = torch.arange(count)[:, None] - torch.arange(count)

    def norm(x: Tensor, name: str) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weights[f"{name}.weight"]

    def linear(x: Tensor, name: str) -> Tensor:
        return F.linear(x, weights[f"{name}.weight"], weights.get(f"{name}.bias"))

    def rotated(x: Tensor) -> Tensor:
        left, right = x.chunk(2, -1)
        return x * cos + torch.cat((-right, left), -1) * sin

    def attended(x: Tensor, name: str, window: int) -> Tensor:
        q, k, v = (linear(x, f"{name}.{one}_proj").view(count, -1, shape.head_size) for one in "qkv")
        if attention.head_norm:
            q, k = norm(q, f"{name}.q_norm"), norm(k, f"{name}.k_norm")
        q, k = rotated(q), rotated(k)
        k, v = (one.repeat_interleave(shape.num_heads // shape.num_kv_heads, 1) for one in (k, v))
        scores = torch.einsum("qnh,knh->nqk", q, k) / math.sqrt(shape.head_size)
        scores = scores.masked_fill((distance < 0) | (distance >= window), -math.inf)
        return linear(torch.einsum("nqk,knh->qnh", scores.softmax(-1), v).flatten(1), f"{name}.o_proj")

    x = weights["model.embed_tokens.weight"][torch.tensor(tokens)]
    for index in range(shape.num_layers):
        layer = f"model.layers.{index}"
        window = shape.layers[index].attention.window or count
        x = x + attended(norm(x, f"{layer}.input_layernorm"), f"{layer}.self_attn", window)
        normed = norm(x, f"{layer}.post_attention_layernorm")
        gate = ACTIVATIONS[shape.layers[0].mlp.activation](linear(normed, f"{layer}.mlp.gate_proj"))
        x = x + linear(gate * linear(normed, f"{layer}.mlp.up_proj"), f"{layer}.mlp.down_proj")
    return linear(norm(x, "model.norm"), "lm_head").log_softmax(-1)
