"""Tiny EAGLE-3 heads for tiny Llamas, and what they guess by the definition: one sequence, no cache, float32.

Owns: both.  Does not know: the engine.
"""

import json
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

Weights = dict[str, Tensor]


def save_head(model: PreTrainedModel, directory: Path, *, draft_vocab_size: int = 0, seed: int = 0, **fields) -> Path:
    """A head of random weights, written as published ones are.  draft_vocab_size: 0 for all of the model's tokens."""
    config = model.config
    hidden, inner, vocab = config.hidden_size, 80, config.vocab_size
    num, num_kv, size = 4, 2, hidden // 4
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator) * 0.2

    draft = draft_vocab_size or vocab
    kept = torch.randperm(vocab, generator=generator)[:draft].sort().values
    tensors = {
        "midlayer.input_layernorm.weight": 1 + random(hidden),
        "midlayer.hidden_norm.weight": 1 + random(hidden),
        "midlayer.post_attention_layernorm.weight": 1 + random(hidden),
        "midlayer.self_attn.q_proj.weight": random(num * size, 2 * hidden),
        "midlayer.self_attn.k_proj.weight": random(num_kv * size, 2 * hidden),
        "midlayer.self_attn.v_proj.weight": random(num_kv * size, 2 * hidden),
        "midlayer.self_attn.o_proj.weight": random(hidden, num * size),
        "midlayer.mlp.gate_proj.weight": random(inner, hidden),
        "midlayer.mlp.up_proj.weight": random(inner, hidden),
        "midlayer.mlp.down_proj.weight": random(hidden, inner),
        "fc.weight": random(hidden, 3 * hidden),
        "norm.weight": 1 + random(hidden),
        "lm_head.weight": random(draft, hidden),
        "d2t": kept - torch.arange(draft),
        "t2d": torch.zeros(vocab, dtype=torch.bool).index_fill_(0, kept, True),
    }
    return write_head(tensors, directory, {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "hidden_size": hidden, "head_dim": size,
        "intermediate_size": inner, "num_hidden_layers": 1, "num_attention_heads": num, "num_key_value_heads": num_kv,
        "vocab_size": vocab, "draft_vocab_size": draft, "max_position_embeddings": 64, "rms_norm_eps": 1e-5,
        "torch_dtype": "float32", "eagle_aux_hidden_state_layer_ids": [1, 2, 3], **fields,
    })  # fmt: skip


def write_head(tensors: Weights, directory: Path, config: dict) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(config))
    return directory


class ReferenceHead:
    """Li et al. 2025.  layers: whose inputs it reads.  trained: weights in the place of those that are stored."""

    def __init__(self, model: PreTrainedModel, directory: Path, trained: Weights | None = None) -> None:
        self.model = model
        self.config = json.loads((directory / "config.json").read_text())
        self.w = trained if trained is not None else load_file(directory / "model.safetensors")
        self.layers = self.config["eagle_aux_hidden_state_layer_ids"]

    def states(self, tokens: list[int]) -> Tensor:
        """[T, D]: the model's at each token, fused."""
        with torch.no_grad():
            found = self.model(torch.tensor([tokens]), output_hidden_states=True).hidden_states
        return F.linear(torch.cat([found[layer][0] for layer in self.layers], -1), self.w["fc.weight"])

    def run(self, tokens: Tensor, states: Tensor) -> Tensor:
        """x_TD behind each (token behind the position, state at the position)."""
        embedded = self.norm(F.embedding(tokens, self.model.get_input_embeddings().weight), "midlayer.input_layernorm")
        normed = self.norm(states, "midlayer.hidden_norm")
        both = torch.cat((embedded, normed), -1)
        size, length = self.config["head_dim"], len(tokens)
        q, k, v = (
            F.linear(both, self.w[f"midlayer.self_attn.{one}_proj.weight"]).view(length, -1, size).transpose(0, 1)
            for one in "qkv"
        )
        angles = torch.arange(length)[:, None] * 10000.0 ** (-torch.arange(0, size, 2) / size)
        q, k = self.turned(q, angles), self.turned(k, angles)
        attended = F.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True, enable_gqa=True)[0]
        residual = normed if self.config.get("norm_before_residual") else states
        x = residual + F.linear(attended.transpose(0, 1).flatten(1), self.w["midlayer.self_attn.o_proj.weight"])
        inner = self.norm(x, "midlayer.post_attention_layernorm")
        gate, up = (F.linear(inner, self.w[f"midlayer.mlp.{one}_proj.weight"]) for one in ("gate", "up"))
        return x + F.linear(F.silu(gate) * up, self.w["midlayer.mlp.down_proj.weight"])

    def logits(self, x: Tensor) -> Tensor:
        return F.linear(self.norm(x, "norm"), self.w["lm_head.weight"])

    def guess(self, tokens: list[int], count: int) -> list[int]:
        """What it guesses behind known tokens, of which the last has not been computed by the model."""
        behind, states = torch.tensor(tokens[1:]), self.states(tokens[:-1])
        guessed: list[int] = []
        for _ in range(count):
            x = self.run(behind, states)[-1:]
            token = int(self.logits(x).argmax())
            guessed.append(token + int(self.w["d2t"][token]))
            behind, states = torch.cat((behind, torch.tensor(guessed[-1:]))), torch.cat((states, x))
        return guessed

    def norm(self, x: Tensor, name: str) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self.w[f"{name}.weight"], self.config["rms_norm_eps"])

    def turned(self, x: Tensor, angles: Tensor) -> Tensor:
        cos, sin = (torch.cat((one, one), -1) for one in (angles.cos(), angles.sin()))
        first, second = x.chunk(2, -1)
        return x * cos + torch.cat((-second, first), -1) * sin
