"""Owns what is said about the trained model: held-out loss, bits per byte, sample completions."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from corpus import SourceFile
from tokenizers import Tokenizer
from tqdm import tqdm
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM
from vocabulary import END_OF_TEXT, encode_documents

BUCKETS = ((0, 256), (256, 512), (512, 1024), (1024, 2048))


CALCULATOR = {
    "name": "calculate",
    "description": "Evaluates an expression",
    "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}},
}
CHATS: tuple[tuple[list[dict[str, str]], list[dict[str, Any]] | None], ...] = (
    ([{"role": "user", "content": "Hello!"}], None),
    ([{"role": "user", "content": "What is a page?"}], None),
    ([{"role": "user", "content": "Who wrote Hamlet?"}], None),
    ([{"role": "user", "content": "What is 12 * 34?"}], [{"type": "function", "function": CALCULATOR}]),
    ([{"role": "user", "content": "Write a function named is_prime."}], None),
)


@dataclass(frozen=True)
class HeldOut:
    """Totals over the held-out files."""

    tokens: int
    bytes: int
    nats: float
    by_position: dict[str, float]
    """Nats per token by position in the context window: does a longer context still help?"""

    @property
    def nats_per_token(self) -> float:
        """Mean cross-entropy."""
        return self.nats / self.tokens

    @property
    def bits_per_byte(self) -> float:
        """Comparable across tokenizers; end-of-text tokens count as loss but not as bytes."""
        return self.nats / math.log(2) / self.bytes


@dataclass(frozen=True)
class Sample:
    """One completion shown in the card."""

    title: str
    prompt: str
    completion: str
    stopped: bool


@torch.inference_mode()
def measure_held_out(model: Qwen3ForCausalLM, tokenizer: Tokenizer, files: list[SourceFile]) -> HeldOut:
    """Score every held-out file, in windows of the full context that do not overlap."""
    device = next(model.parameters()).device
    context = model.config.max_position_embeddings
    end = tokenizer.token_to_id(END_OF_TEXT)
    sums = torch.zeros(context, dtype=torch.float64)
    counts = torch.zeros(context, dtype=torch.int64)
    documents = encode_documents(tokenizer, [file.text for file in files])
    for ids in tqdm(documents, total=len(files), desc="held-out", mininterval=1.0):
        sequence = torch.tensor([end, *ids.tolist()], device=device)
        for start in range(0, len(sequence) - 1, context):
            window = sequence[start : start + context + 1]
            logits = model(input_ids=window[None, :-1], use_cache=False).logits[0].float()
            losses = torch.nn.functional.cross_entropy(logits, window[1:], reduction="none")
            sums[: len(losses)] += losses.double().cpu()
            counts[: len(losses)] += 1
    by_position = {
        f"{low}-{high}": float(sums[low:high].sum() / counts[low:high].sum())
        for low, high in BUCKETS
        if counts[low:high].sum() > 0
    }
    size = sum(len(file.text.encode()) for file in files)
    return HeldOut(int(counts.sum()), size, float(sums.sum()), by_position)


@torch.inference_mode()
def complete(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    title: str,
    prompt: str,
    temperature: float,
    seed: int,
    limit: int = 120,
) -> Sample:
    """Continue `prompt`, greedily when the temperature is 0."""
    torch.manual_seed(seed)
    inputs = tokenizer(prompt, return_tensors="pt", add_special_tokens=False)
    ids = inputs["input_ids"].to(next(model.parameters()).device)
    sampling = {"do_sample": True, "temperature": temperature} if temperature else {"do_sample": False}
    output = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=limit, **sampling)
    fresh = output[0, ids.shape[1] :].tolist()
    ends = set(model.generation_config.eos_token_id)
    stopped = bool(fresh) and fresh[-1] in ends
    text = tokenizer.decode(fresh[:-1] if stopped else fresh)
    return Sample(title, prompt, text, stopped)


def take_samples(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, seed: int) -> list[Sample]:
    """The completions and chats of the card; none is chosen by hand."""
    samples: list[Sample] = []
    for prompt in ("def fibonacci(n):\n", "def fibonacci(n):"):
        shown = repr(prompt).strip("'")
        samples.append(complete(model, tokenizer, f"`{shown}`, greedy", prompt, 0.0, seed))
        title = f"`{shown}`, temperature 0.6"
        samples.append(complete(model, tokenizer, title, prompt, 0.6, seed))
    for turns, tools in CHATS:
        prompt = tokenizer.apply_chat_template(turns, tools=tools, tokenize=False, add_generation_prompt=True)
        assert isinstance(prompt, str)
        samples.append(complete(model, tokenizer, "Chat, greedy", prompt, 0.0, seed, 200))
    return samples
