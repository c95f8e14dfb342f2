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

from collections.abc import Mapping, Sequence
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from engine.llm import LLM
from engine.sampling.sampler import Sampler
from engine.sampling.state import Newcomer
from engine.types.errors import WeightsError
from engine.types.params import SamplingParams

# The engine and transformers differ by rounding: by far less than this, in any dtype, if they have the same weights.
MOST_APART = 1.0
PAGES = 1024  # of 16 tokens, where ``config`` names no number


class TrainedModel:
    """A model of transformers, and an engine that computes its log probabilities.

    The engine loads the weights again after they have changed.  An optimizer's steps are noticed, as is every change
    in place of a parameter; a change of a parameter's ``.data`` is not, and needs ``refresh``.
    """

    def __init__(self, module: PreTrainedModel, config: Mapping[str, Mapping[str, Any]] | None = None) -> None:
        """Make it.  config: tables of the sampler's configuration, whose kernels and types give the bits."""
        given = {name: dict(table) for name, table in (config or {}).items()}
        given["model"] = {"numerics": "invariant", **given.get("model", {}), "tokenizer": "none"}
        given["kv"] = {"num_pages": PAGES, **given.get("kv", {})}
        self.module = module
        self._config = given
        self._loaded: tuple[tuple[int, int], ...] = ()
        self._engine: LLM | None = None
        self._folder: TemporaryDirectory[str] | None = None

    def exact(self, sequences: Sequence[Sequence[int]], params: SamplingParams) -> list[Tensor]:
        """Return log_probs_E of each sequence as the engine computes them, float32 on the CPU."""
        asked = params.replace(max_tokens=1, logprobs=None, prompt_logprobs=0)
        outputs = self._current().generate([list(one) for one in sequences], asked, progress=False)
        return [
            torch.tensor([entry.sampled.logprob for entry in one.prompt_logprobs[1:]], dtype=torch.float32)
            for one in outputs
        ]

    def refresh(self) -> None:
        """Have the engine load the weights again before it computes."""
        self._loaded = ()

    def close(self) -> None:
        """End the engine; it starts again if it is needed."""
        if self._engine is not None:
            self._engine.close()
        if self._folder is not None:
            self._folder.cleanup()
        self._engine = self._folder = None

    def _current(self) -> LLM:
        """Return the engine with the module's weights."""
        weights = tuple((one.data_ptr(), one._version) for one in self.module.parameters())
        if self._engine is None or weights != self._loaded:
            folder, before = TemporaryDirectory(prefix="callboard-training-"), self._folder
            self.module.save_pretrained(folder.name)
            if self._engine is None:
                self._engine = LLM(folder.name, config=self._config, progress=False)
            else:
                self._engine.weights.update(folder.name)
            self._loaded, self._folder = weights, folder  # an executor that dies reads them again
            if before is not None:
                before.cleanup()
        return self._engine


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
    params: how the tokens were drawn, if ``processed_logprobs`` is set: temperature and cuts count.
    Raises RequestError for a sequence that the engine refuses, WeightsError if the engine has other weights."""
    params = params or SamplingParams()
    found = []
    for sequence, exact_E in zip(sequences, model.exact(sequences, params), strict=True):
        reference_E = reference_log_probs(model.module, sequence, params)
        exact_E = exact_E.to(reference_E.device)
        apart_E = (exact_E - reference_E.detach()).abs()
        if (apart := float(torch.where(exact_E.isfinite(), apart_E, 0.0).max())) > MOST_APART:
            raise WeightsError(
                f"the log probabilities of the engine and of transformers are {apart:.3g} apart: parameters were "
                "changed where it could not be noticed; call TrainedModel.refresh() after such a change"
            )
        found.append(_with_value(reference_E, exact_E))
    return found


def reference_log_probs(module: PreTrainedModel, sequence: Sequence[int], params: SamplingParams) -> Tensor:
    """Return log_probs_E as the module computes them, in its own dtype or float32, whichever has more digits."""
    token_ids = torch.tensor([list(sequence)], device=module.device)
    logits_EV = module(input_ids=token_ids, use_cache=False).logits[0, :-1]
    if logits_EV.dtype != torch.float64:
        logits_EV = logits_EV.to(torch.float32)
    next_E1 = token_ids[0, 1:, None]
    if params.processed_logprobs and params.temperature > 0:
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
