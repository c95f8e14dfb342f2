"""Tiny models with a layer for multi-token prediction as published files have it, and what it guesses by definition.

Owns: both.  Does not know: the engine.
transformers reads no such layer.  It is one of the family's own layers between other norms, so the reference is the
layer that transformers has behind those that its model computes.
"""

import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from tests.models.checkpoints import VARIANTS, build

Weights = dict[str, Tensor]
QWEN = ("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc", "mtp.norm")
NUM_LAYERS = 3
STEM = f"model.layers.{NUM_LAYERS}"
DEEPSEEK = (f"{STEM}.enorm", f"{STEM}.hnorm", f"{STEM}.eh_proj", f"{STEM}.shared_head.norm")
LISTS = {"layer_types": "full_attention", "indexer_types": "full"}  # settings by layer, and the last layer's


class ReferenceMTP:
    """DeepSeek-AI 2024, section 2.2, with one layer, whose output is also its next input, as vLLM computes it for Qwen.

    model: one more layer than it computes.  names: of the norms of embedding and state, of the product, of the norm
    behind the layer.  weights: of these.  offset: what is added to the weights of norms."""

    def __init__(self, variant: str) -> None:
        self.is_qwen = variant.startswith("qwen")
        settings = VARIANTS[variant][1]
        self.lists = {name: settings[name] for name in LISTS if name in settings}
        more: dict[str, Any] = {name: [*one, LISTS[name]] for name, one in self.lists.items()}
        self.model: PreTrainedModel = build(variant, num_hidden_layers=NUM_LAYERS + 1, **more)
        self.config = self.model.config
        self.names = QWEN if self.is_qwen else DEEPSEEK
        self.offset = float(self.is_qwen)
        width, generator = self.config.hidden_size, torch.Generator().manual_seed(7)
        sizes = {name: (width, 2 * width) if name == self.names[2] else (width,) for name in self.names}
        self.weights = {name: torch.randn(size, generator=generator) * 0.2 for name, size in sizes.items()}
        for name in (*self.names[:2], self.names[3]):
            self.weights[name] += 1 - self.offset

    @property
    def layer(self) -> torch.nn.Module:
        """The one behind those that the model computes."""
        return self.model.model.layers[NUM_LAYERS]

    def save(self, directory: Path) -> Path:
        """Write it as it is published."""
        self.config.num_hidden_layers = NUM_LAYERS + 1
        self.model.save_pretrained(directory)
        self.config.num_hidden_layers = NUM_LAYERS
        path = directory / "model.safetensors"
        stored = load_file(path)
        if self.is_qwen:
            stored = {name.replace(f"{STEM}.", "mtp.layers.0."): one for name, one in stored.items()}
        else:
            for name in ("embed_tokens", "shared_head.head"):  # copies, which nothing reads
                stored[f"{STEM}.{name}.weight"] = torch.zeros(3)
        save_file(stored | {f"{name}.weight": one.contiguous() for name, one in self.weights.items()}, path)
        config = json.loads((directory / "config.json").read_text())
        (directory / "config.json").write_text(json.dumps(config | {"num_hidden_layers": NUM_LAYERS} | self.lists))
        return directory

    def states(self, tokens: list[int]) -> Tensor:
        """[T, D]: what the model's LM head reads of each token."""
        self.config.num_hidden_layers = NUM_LAYERS
        with torch.no_grad():
            return self.model.model(torch.tensor([tokens])).last_hidden_state[0]

    def run(self, tokens: Tensor, states: Tensor) -> Tensor:
        """x_TD behind each (token behind the position, state at the position)."""
        of_embedding, of_state, product, behind = self.names
        embedded = F.embedding(tokens, self.model.get_input_embeddings().weight)
        both = torch.cat((self.norm(embedded, of_embedding), self.norm(states, of_state)), -1)
        x = F.linear(both, self.weights[product])[None]
        places = torch.arange(len(tokens))[None]
        mask = torch.full((len(tokens), len(tokens)), torch.finfo(torch.float32).min).triu(1)[None, None]
        with torch.no_grad():
            angles = self.model.model.rotary_emb(x, places)
            found = self.layer(x, position_embeddings=angles, attention_mask=mask, position_ids=places)
        x = found[0] if isinstance(found, tuple) else found  # GLM-5 also returns what its indexer has chosen
        return self.norm(x[0], behind)

    def guess(self, tokens: list[int], count: int) -> list[int]:
        """What it guesses behind known tokens, of which the last has not been computed by the model."""
        behind, states = torch.tensor(tokens[1:]), self.states(tokens[:-1])
        guessed: list[int] = []
        for _ in range(count):
            x = self.run(behind, states)[-1:]
            with torch.no_grad():
                guessed.append(int(self.model.lm_head(x).argmax()))
            behind, states = torch.cat((behind, torch.tensor(guessed[-1:]))), torch.cat((states, x))
        return guessed

    def norm(self, x: Tensor, name: str) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self.weights[name] + self.offset, self.config.rms_norm_eps)

    def copy_model(self) -> None:
        """Make the next token depend on the last one alone, by the last layer's MLP, and let the layer have the same.

        Embeddings of length 1 are what their norms are, so the layer's input is the model's."""
        layers, width = self.model.model.layers, self.config.hidden_size
        with torch.no_grad():
            for index, layer in enumerate(layers):
                for name, weight in layer.named_parameters():
                    is_mlp = name.startswith("mlp.") and index >= NUM_LAYERS - 1
                    if not is_mlp and name.endswith(
                        ("o_proj.weight", "o_proj.bias", "out_proj.weight", "down_proj.weight", "down_proj")
                    ):
                        weight.zero_()
            layers[NUM_LAYERS].load_state_dict(
                {
                    **layers[NUM_LAYERS].state_dict(),
                    **_of(layers[NUM_LAYERS - 1], ("mlp.", "post_attention_layernorm.")),
                }
            )
            table = self.model.get_input_embeddings().weight
            table.copy_(F.rms_norm(table, (width,)))
            self.weights[self.names[0]].fill_(1 - self.offset)
            self.weights[self.names[3]].copy_(self.model.model.norm.weight)
            self.weights[self.names[2]].copy_(torch.cat((torch.eye(width), torch.zeros(width, width)), 1))


def _of(layer: torch.nn.Module, beginnings: tuple[str, ...]) -> Weights:
    return {name: one for name, one in layer.state_dict().items() if name.startswith(beginnings)}
