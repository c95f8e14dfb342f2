"""Requests for numbers in place of text: their sampling parameters, and the conversion of the model's raw output.

Owns: named prompts and prompts of pairs, vectors, probabilities and scores.
Does not know: HTTP, tokens, how a state is computed.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from engine.checkpoints.use import PLAIN, ModelUse
from engine.features.pooling.checkpoint import Pooling
from engine.messages import RequestOptions
from engine.text.pairs import pair
from engine.types.errors import FieldError, RequestError
from engine.types.params import SamplingParams
from engine.types.prompt import Prompt

Float32 = npt.NDArray[np.float32]
LONGEST = -1  # truncate_prompt_tokens: cut to what fits the context
TINY = 1e-12  # torch.nn.functional.normalize divides by no less


class PooledRequests:
    """Builds requests for one model and converts their results.  max_len: longest prompt plus output in tokens."""

    def __init__(self, use: ModelUse, max_len: int) -> None:
        self.pooling = Pooling.of(use)
        self._ways = use.ways
        self._longest = max_len - 1 if use.kind == "generate" else max_len

    def params(self, method: str | None = None) -> SamplingParams:
        """Return the sampling parameters.  method: a way of the model's use, None for its own.

        Raises RequestError if a classifier is given a method."""
        if self.pooling.kind == "classify":
            if method is not None:
                raise FieldError("pooling", f"{self.pooling} goes by the last token")
            return PLAIN.replace(pooling="classify")
        return PLAIN.replace(pooling=method or self.pooling.method)

    @property
    def tasks(self) -> tuple[str, ...]:
        """The tasks of one prompt, the model's own first; the others give numbers for each token."""
        own = "classify" if self.pooling.kind == "classify" else "embed"
        return own, *(name for name, way in self._ways.items() if way.width)

    def options(self, truncate: int | None, priority: int = 0, cache_salt: str = "") -> RequestOptions:
        """Return the request's options.  truncate: most tokens of a prompt, -1 for what fits, None refuses more."""
        truncate_to = 0
        if truncate is not None:
            truncate_to = self._longest if truncate == LONGEST else truncate
            if not 1 <= truncate_to <= self._longest:
                allowed = f"-1, or from 1 to {self._longest}"
                raise RequestError(
                    f"truncate_prompt_tokens={truncate}: must be {allowed}", param="truncate_prompt_tokens"
                )
        return RequestOptions(prompt_only=True, truncate_to=truncate_to, priority=priority, cache_salt=cache_salt)

    def prompts(self, prompts: Sequence[Prompt], prompt_name: str | None = None) -> tuple[Prompt, ...]:
        """Return the prompts with the named prompt, or the model's default one, before each text."""
        known = self.pooling.prompts
        name = prompt_name if prompt_name is not None else self.pooling.default_prompt
        if name and name not in known:
            names = f"one of {', '.join(map(repr, known))}" if known else "left out: the model has no named prompts"
            raise RequestError(f"prompt_name={name[:100]!r}: must be {names}", param="prompt_name")
        if prompt_name and not all(isinstance(one, str) for one in prompts):
            raise FieldError("prompt_name", "goes before texts only")
        before = known[name] if name else ""
        return tuple(before + one if isinstance(one, str) else one for one in prompts)

    def pairs(self, queries: Sequence[str], documents: Sequence[str]) -> tuple[Prompt, ...]:
        """Return the prompts for ``scores``: of one query and many documents, or of equal numbers of both.

        Raises RequestError for any other combination."""
        if len(queries) not in (1, len(documents)) or not documents:
            seen = f"{len(queries)} texts to compare with {len(documents)}"
            raise RequestError(f"{seen}: must be one with at least one, or as many of both", param="text_2")
        if self.pooling.kind == "embed":
            return self.prompts([*queries, *documents])
        every = queries if len(queries) == len(documents) else [queries[0]] * len(documents)
        return tuple(pair(query, one) for query, one in zip(every, documents, strict=True))

    def scores(self, outputs: Sequence[Float32], num_queries: int, *, activated: bool = True) -> list[float]:
        """Return one score per document.  outputs: ``result`` for each prompt of ``pairs``, not activated."""
        if self.pooling.kind == "classify":
            activation = _ACTIVATIONS[self.pooling.activation if activated else "identity"]
            return [float(activation(one)[0]) for one in outputs]
        vectors = [_normalized(one) for one in outputs]
        queries, documents = vectors[:num_queries], vectors[num_queries:]
        every = queries if len(queries) == len(documents) else queries * len(documents)
        return [float(query @ document) for query, document in zip(every, documents, strict=True)]

    def check_dimensions(self, dimensions: int | None) -> None:
        """Raise RequestError if the model was not trained for embeddings of this size."""
        allowed = self.pooling.dimensions
        if dimensions is not None and allowed and dimensions not in allowed:
            raise RequestError(
                f"dimensions={dimensions}: the model allows {', '.join(map(str, allowed))}", param="dimensions"
            )

    def result(
        self, output: bytes, *, dimensions: int | None = None, activated: bool = True, task: str | None = None
    ) -> Float32:
        """Return an embedding, normalized if the model's are, or the probabilities of the labels.

        output: float32[n].  activated: False returns the numbers as the model computes them.
        task: one of ``tasks``, None for the first; the others return a row for each token."""
        if not output:
            raise RequestError(
                "the vectors of this prompt's tokens are too large; send a shorter one, or fewer at once",
                status=413,
                code="output_too_large",
            )
        numbers = np.frombuffer(output, dtype=np.float32)
        if task is not None and (width := self._ways[task].width if task in self._ways else 0):
            numbers = numbers.reshape(-1, width)
        if self.pooling.kind == "classify":
            return _ACTIVATIONS[self.pooling.activation](numbers) if activated else numbers
        if dimensions is not None:
            if dimensions > (size := numbers.shape[-1]):
                raise RequestError(f"dimensions={dimensions}: the model has {size}", param="dimensions")
            numbers = numbers[..., :dimensions]
        return _normalized(numbers) if activated and self.pooling.normalized else numbers

    def label(self, probabilities: Float32) -> str:
        """Return the likeliest label."""
        return self.pooling.labels[int(probabilities.argmax())]


def _normalized(vectors: Float32) -> Float32:
    lengths = np.maximum(np.linalg.norm(vectors, axis=-1, keepdims=True), np.float32(TINY))
    normalized: Float32 = vectors / lengths
    return normalized


def _softmax(logits: Float32) -> Float32:
    powers = np.exp(logits - logits.max())
    shares: Float32 = powers / powers.sum()
    return shares


def _sigmoid(logits: Float32) -> Float32:
    small = np.exp(-np.abs(logits))  # exp of a negative number cannot overflow
    shares: Float32 = np.where(logits >= 0, 1 / (1 + small), small / (1 + small)).astype(np.float32)
    return shares


_ACTIVATIONS = {"identity": lambda logits: logits, "sigmoid": _sigmoid, "softmax": _softmax}
