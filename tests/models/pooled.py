"""Tiny random checkpoints that generate nothing, written by transformers, and what that gives for prompts."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.processors import Sequence, TemplateProcessing
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from engine.checkpoints.shards import SINGLE_FILE
from tests.models.checkpoints import SIZES, VOCAB, random_tokens

RAGGED = [random_tokens(count, seed=count) for count in (1, 2, 15, 16, 17, 40, 90)]
PAD = 0
DEMO = Path(__file__).parents[2] / "examples" / "demo_model"


def build(family: str, head: str, **changes: Any) -> PreTrainedModel:
    """A model of a family with another head, as transformers names both."""
    torch.manual_seed(len(family + head))
    sizes: dict[str, Any] = {**SIZES, "head_dim": 16, **changes}
    if family == "GPT2":
        sizes = {"vocab_size": VOCAB, "n_embd": 64, "n_head": 4, "n_layer": 2, "n_positions": 512, "pad_token_id": PAD}
        sizes |= {"initializer_range": 0.2, **changes}
    config: PretrainedConfig = getattr(transformers, f"{family}Config")(**sizes, attn_implementation="eager")
    model: PreTrainedModel = getattr(transformers, f"{family}{head}")(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.startswith("score"):
                weight.normal_(0, 0.2)
    return model


def states(model: PreTrainedModel, tokens: list[int]) -> Tensor:
    """The last layer's normed states [len(tokens), D] of a model without a head."""
    with torch.no_grad():
        return model(torch.tensor([tokens])).last_hidden_state[0]


def label_logits(model: PreTrainedModel, tokens: list[int]) -> np.ndarray:
    """Logits of labels of one prompt."""
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0].numpy()


def save_reward_model(body: PreTrainedModel, directory: Path) -> Callable[[list[int]], float]:
    """Write a body of transformers as a ``ForRewardModel``, which only repositories' own code has: a head of two
    products behind the last token's state.  Returns what gives a prompt's reward."""
    size = body.config.hidden_size
    score = nn.Sequential(nn.Linear(size, size), nn.ReLU(), nn.Linear(size, 1))
    tensors = {f"model.{name}": one for name, one in body.state_dict().items()}
    save_file(tensors | {f"score.{name}": one for name, one in score.state_dict().items()}, directory / SINGLE_FILE)
    named = [type(body).__name__.replace("Model", "ForRewardModel")]
    (directory / "config.json").write_text(json.dumps(body.config.to_dict() | {"architectures": named}))

    def reward(tokens: list[int]) -> float:
        with torch.no_grad():
            return score(states(body, tokens)[-1]).item()

    return reward


def with_tokenizer(directory: Path) -> None:
    """Give a checkpoint the demo model's tokenizer, which here ends every text with <|endoftext|>, id 0."""
    tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    end = TemplateProcessing(
        single="$A <|endoftext|>", pair="$A <|endoftext|> $B <|endoftext|>", special_tokens=[("<|endoftext|>", 0)]
    )
    tokenizer.post_processor = Sequence([tokenizer.post_processor, end])
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')


def write_modules(directory: Path, pooling: str, *, normalize: bool, **config: Any) -> None:
    """The files that sentence-transformers writes beside a checkpoint.  config: of the whole, such as prompts."""
    kinds = [("Transformer", ""), ("Pooling", "1_Pooling"), *([("Normalize", "2_Normalize")] if normalize else [])]
    modules = [
        {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for index, (kind, path) in enumerate(kinds)
    ]
    (directory / "modules.json").write_text(json.dumps(modules))
    (directory / "1_Pooling").mkdir()
    modes = {f"pooling_mode_{name}": name == pooling for name in ("cls_token", "mean_tokens", "lasttoken")}
    (directory / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 64, **modes}))
    (directory / "config_sentence_transformers.json").write_text(json.dumps(config))
