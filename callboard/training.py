"""Log probabilities for training, with the bits that the sampler reports.

Legend: V vocabulary · E tokens of a sequence that have one before them
Owns: the engine beside a model in training, and how gradients pass through what it computes.
Does not know: optimizers, rewards, servers.

A policy gradient needs the probability with which a token was drawn.  A trainer computes it again, with other kernels
in another order, and gets other numbers: its samples are no longer from the policy that it differentiates.  Here the
engine computes the value, with invariant numerics, in which a token has the same bits alone and in any company.  The
gradient is autograd's, of the same mathematics in the model of transformers.

Usage::

    model = TrainedModel(AutoModelForCausalLM.from_pretrained(path))
    (log_probs_E,) = log_probs(model, [prompt + output])
    loss = -(advantage * log_probs_E[len(prompt) - 1 :]).mean()
    loss.backward()
"""

import hashlib
from collections.abc import Mapping, Sequence
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from engine.llm import LLM, Completion
from engine.sampling.sampler import Sampler
from engine.sampling.state import Newcomer
from engine.types.errors import RequestError, WeightsError
from engine.types.params import SamplingParams

# The engine and transformers differ by rounding: by far less than this, in any dtype, if they have the same weights.
MOST_APART = 1.0
PAGES = 1024  # of 16 tokens, where ``config`` names no number


class TrainedModel:
    """A model of transformers, and an engine that computes its log probabilities.

    The engine loads the weights again after they have changed, which a digest of their bits shows.
    """

    def __init__(self, module: PreTrainedModel, config: Mapping[str, Mapping[str, Any]] | None = None) -> None:
        """Make it.  config: tables of the sampler's configuration, whose kernels and types give the bits."""
        given = {name: dict(table) for name, table in (config or {}).items()}
        given["model"] = {"numerics": "invariant", **given.get("model", {}), "tokenizer": "none"}
        given["kv"] = {"num_pages": PAGES, **given.get("kv", {})}
        self.module = module
        self._config = given
        self._loaded = ""
        self._engine: LLM | None = None
        self._folders: list[TemporaryDirectory[str]] = []  # what it started with, and the present weights

    def exact(self, sequences: Sequence[Sequence[int]], params: SamplingParams) -> list[Tensor]:
        """Return log_probs_E of each sequence as the engine computes them, float32 on the CPU."""
        scored = [list(one) for one in sequences if len(one) > 1]
        prompts = [one[:-1] for one in scored]
        asked = [_scoring(params, one[-1]) for one in scored]
        outputs = iter(self._current().generate(prompts, asked, progress=False)) if prompts else iter(())
        return [_values(next(outputs)) if len(one) > 1 else torch.zeros(0) for one in sequences]

    def close(self) -> None:
        """End the engine; it starts again if it is needed."""
        if self._engine is not None:
            self._engine.close()
        self._engine = None
        while self._folders:
            self._folders.pop().cleanup()

    def _load(self, folder: str) -> None:
        """Have an engine with the weights of a folder: the present one, or another if its weights cannot change."""
        if self._engine is not None:
            try:
                self._engine.weights.update(folder)
                return
            except (RequestError, WeightsError):  # those of an encoder of pictures, or captured steps
                self._engine.close()
                self._engine = None
        self._engine = LLM(folder, config=self._config, progress=False)

    def _current(self) -> LLM:
        """Return the engine with the module's weights."""
        weights = _digest(self.module)
        if self._engine is None or weights != self._loaded:
            folder = TemporaryDirectory(prefix="callboard-training-")
            self.module.save_pretrained(folder.name)
            try:
                self._load(folder.name)
            except BaseException:
                folder.cleanup()
                raise
            self._loaded = weights
            self._folders.append(folder)  # an executor that dies reads both again
            while len(self._folders) > 2:
                self._folders.pop(1).cleanup()
        assert self._engine is not None, "it was loaded"
        return self._engine


def _scoring(params: SamplingParams, last: int) -> SamplingParams:
    """Return parameters of a request for the log probabilities of its prompt, and of the token ``last`` behind it."""
    kept = params if params.processed_logprobs else SamplingParams()
    return kept.replace(
        max_tokens=max(1, kept.min_tokens), logprobs=0, logprob_token_ids=(last,), prompt_logprobs=0, ignore_eos=True
    )


def _values(output: Completion) -> Tensor:
    """Return log_probs_E of a sequence without its last token, and of that one."""
    behind = output.logprobs[0].top[0].logprob
    return torch.tensor([*(entry.sampled.logprob for entry in output.prompt_logprobs[1:]), behind])


def _digest(module: PreTrainedModel) -> str:
    """Return a digest of the bits of a module's parameters."""
    found = hashlib.blake2b()
    for one in module.parameters():
        found.update(one.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return found.hexdigest()


class _Exact(torch.autograd.Function):
    """The engine's values with the reference's gradient."""

    @staticmethod
    def forward(ctx: Any, reference_E: Tensor, exact_E: Tensor) -> Tensor:
        return exact_E.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


def _with_value(reference_E: Tensor, exact_E: Tensor) -> Tensor:
    made: Tensor = _Exact.apply(reference_E, exact_E)  # type: ignore[no-untyped-call]
    return made


def log_probs(
    model: TrainedModel, sequences: Sequence[Sequence[int]], params: SamplingParams | None = None
) -> list[Tensor]:
    """Return log_probs_E of each sequence, float32: of every token but the first, given those before it.

    The value of a token that the cuts leave out, such as one of a prompt may be, is -inf.
    The values have the bits that the engine reports for these tokens when it draws them with invariant numerics; the
    gradients with respect to the module's parameters are autograd's.
    The module has all sequences in one pass: give it as many as there is memory for.
    params: how the tokens were drawn, if ``processed_logprobs`` is set: temperature and cuts count.
    Raises RequestError for a sequence that the engine refuses, WeightsError if it computes another model than the
    module, such as one with a layer that was added in Python."""
    params = params or SamplingParams()
    exact_E, lengths = torch.cat(model.exact(sequences, params)), [max(0, len(one) - 1) for one in sequences]
    reference_E = reference_log_probs(model.module, sequences, params)
    exact_E = exact_E.to(reference_E.device)
    _check_model(exact_E, reference_E.detach(), params)
    return list(torch.split(_with_value(reference_E, exact_E), lengths))


def _check_model(exact_E: Tensor, reference_E: Tensor, params: SamplingParams) -> None:
    """Raise WeightsError if values are further apart than rounding makes them."""
    sharpness = 1.0 if params.greedy or not params.processed_logprobs else max(1.0, 1 / params.temperature)
    apart_E = torch.where(exact_E.isfinite(), (exact_E - reference_E).abs() / sharpness, 0.0)
    if len(apart_E) and (apart := float(apart_E.max())) > MOST_APART:
        raise WeightsError(
            f"the log probabilities of the engine and of the module are {apart:.3g} apart, more than rounding makes: "
            "the module computes something that its checkpoint does not say"
        )


def reference_log_probs(module: PreTrainedModel, sequences: Sequence[Sequence[int]], params: SamplingParams) -> Tensor:
    """Return log_probs_E of all sequences, one after the other, as the module computes them in one pass.

    They are in the module's dtype or float32, whichever has more digits."""
    # No token sees what is behind it, so the ends of shorter sequences need no mask.
    token_ids_BL = pad_sequence([torch.tensor(list(one)) for one in sequences], batch_first=True).to(module.device)
    logits_BLV = module(input_ids=token_ids_BL, use_cache=False).logits
    inside_BL = torch.arange(1, token_ids_BL.shape[1]) < torch.tensor([[len(one)] for one in sequences])
    logits_EV, next_E1 = logits_BLV[:, :-1][inside_BL], token_ids_BL[:, 1:][inside_BL][:, None]
    if logits_EV.dtype != torch.float64:
        logits_EV = logits_EV.to(torch.float32)
    if params.processed_logprobs and not params.greedy and len(logits_EV):
        cut_EV = _cut(logits_EV.detach(), params).scatter(1, next_E1, False)  # what was drawn was not cut
        logits_EV = (logits_EV / params.temperature).masked_fill(cut_EV, -torch.inf)
    found_E: Tensor = logits_EV.log_softmax(dim=-1).gather(1, next_E1)[:, 0]
    return found_E


def _cut(logits_EV: Tensor, params: SamplingParams) -> Tensor:
    """Return which tokens top_k, top_p and min_p leave out, bool[E, V]."""
    num, vocab_size = logits_EV.shape
    sampler = Sampler(1, vocab_size, 1, logits_EV.device)
    sampler.admit([Newcomer(0, params, np.zeros(1, dtype=np.int32), 1)], ())
    return sampler.scaled(logits_EV, np.zeros(num, dtype=np.int64)) == -torch.inf
