"""The offline API: the whole engine as ordinary calls, without a server.

    from callboard import LLM, SamplingParams

    with LLM("examples/demo_model") as llm:
        for completion in llm.generate(["def add(a, b):", "import "], SamplingParams(temperature=0, max_tokens=32)):
            print(completion.text)

Owns: an event loop in a thread of its own, and the engine that runs on it.  Does not know: HTTP.
"""

import asyncio
import threading
import weakref
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import numpy.typing as npt
import uvloop
from tqdm import tqdm

from engine.actors.stream import Stream
from engine.config import Config, build_config
from engine.control.system import System
from engine.messages import DEFAULT_OPTIONS, Delta, Finish, RequestOptions, Usage
from engine.text.turns import read_conversations
from engine.types.errors import RequestError
from engine.types.logprobs import TokenLogprobs
from engine.types.params import SamplingParams
from engine.types.prompt import Prompt
from engine.types.versions import versions

if TYPE_CHECKING:
    from engine.features.pooling.requests import PooledRequests
    from engine.features.weight_updates.running import RunningWeights

T = TypeVar("T")
Message = Mapping[str, Any]
Prompts = str | Sequence[int] | Sequence[str | Sequence[int]]
Conversations = Sequence[Message] | Sequence[Sequence[Message]]
Params = SamplingParams | Sequence[SamplingParams]

BAR_AFTER_S = 0.3
STREAM_POLL_S = 0.5  # a blocked caller wakes up this often, so that Ctrl-C works


@dataclass(frozen=True, slots=True)
class Completion:
    """The output for one prompt.

    finish_reason: 'stop', 'length' or 'abort'.  stop_reason: the stop string or token id that ended it, if any.
    logprobs: one entry per token if ``SamplingParams.logprobs`` is set.
    prompt_logprobs: one entry per token of the prompt if ``SamplingParams.prompt_logprobs`` is set; the first one's
    number means nothing.
    weight_versions: (n, version): the tokens from the n-th on are of this version of the weights; no entry for those
    of the weights that the engine started with.
    """

    prompt: Prompt
    text: str
    token_ids: list[int]
    finish_reason: str
    stop_reason: str | int | None
    usage: Usage
    logprobs: tuple[TokenLogprobs, ...]
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    weight_versions: tuple[tuple[int, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Pooled:
    """The numbers that a model returns for one prompt in place of text.

    data: float32[n], an embedding or one value per label; [tokens, n] for ``token_embed``.
    label: the likeliest label; '' for an embedding.
    """

    prompt: Prompt
    data: npt.NDArray[np.float32]
    label: str
    usage: Usage


class LLM:
    """An engine in this process.  Use it as a context manager, or call ``close``.

    model: checkpoint directory, hub id, or None for what ``config`` (or its default, the demo model) names.
    config: the tables of a configuration file, e.g. ``LLM("path", config={"kv": {"page_size": 1}})``.
    Raises ConfigError, WeightsError or PluginError ; the message names the next step.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        config: Config | Mapping[str, Mapping[str, Any]] | None = None,
        progress: bool = True,
    ) -> None:
        base = config if isinstance(config, Config) else build_config(Config(), config or {})
        self.config = base if model is None else build_config(base, {"model": {"path": str(model)}})
        self._progress = progress
        self._system = System(self.config, progress=progress)
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=_run_loop, args=(self._loop,), name="callboard-loop", daemon=True)
        self._thread.start()
        self._finalizer = weakref.finalize(self, _shut_down, self._loop, self._thread, self._system)
        try:
            self._await(self._system.start())
        except BaseException:
            self.close()
            raise

    @property
    def max_model_len(self) -> int:
        """The most tokens of prompt plus output."""
        return self._system.max_len

    @property
    def vocab_size(self) -> int:
        """The size of the vocabulary; token ids are smaller."""
        return self._system.spec.vocab_size

    @property
    def sampling_defaults(self) -> dict[str, float | int]:
        """The sampling parameters that the checkpoint recommends; a request has them only if it names them."""
        return self._system.engine.sampling_defaults

    def generate(
        self, prompts: Prompts, params: Params | None = None, *, progress: bool | None = None
    ) -> list[Completion]:
        """Complete every prompt; the results are in the order of the prompts.

        prompts: one text or list of token ids, or several.  params: one for all, or one per prompt.
        Raises RequestError for the first prompt that is refused; the others are cancelled.
        """
        return self._run_batch(_as_prompts(prompts), params, progress)

    def chat(
        self, conversations: Conversations, params: Params | None = None, *, progress: bool | None = None
    ) -> list[Completion]:
        """Answer one conversation (a list of messages like those of the OpenAI API) or several.

        A message has a role and content, and may have a name, reasoning, tool calls or the id of the call it answers.
        A content with pictures is a list of parts, as ``read_turn`` reads it.
        """
        return self._run_batch(_as_conversations(conversations), params, progress)

    def embed(
        self,
        prompts: Prompts,
        *,
        dimensions: int | None = None,
        prompt_name: str | None = None,
        truncate_prompt_tokens: int | None = None,
        progress: bool | None = None,
    ) -> list[Pooled]:
        """Embed every prompt by the checkpoint's own pooling and normalization.

        dimensions: how many leading dimensions to keep; None keeps all.
        prompt_name: the checkpoint's named prompt that is put before each text.
        truncate_prompt_tokens: cut a longer prompt at its end, -1 to what fits; None refuses it.
        Raises RequestError for a model without embeddings, and as ``generate`` does.
        """
        self._system.spec.use.check("embed", "it gives no embeddings")
        self._requests.check_dimensions(dimensions)
        every = self._requests.prompts(_as_prompts(prompts), prompt_name)
        return self._pool(every, truncate_prompt_tokens, progress, dimensions=dimensions)

    def classify(
        self,
        prompts: Prompts,
        *,
        use_activation: bool = True,
        truncate_prompt_tokens: int | None = None,
        progress: bool | None = None,
    ) -> list[Pooled]:
        """Return the probability of each label, or its logit without ``use_activation``.

        Other arguments and errors are those of ``embed``."""
        self._system.spec.use.check("classify", "it has no labels")
        return self._pool(_as_prompts(prompts), truncate_prompt_tokens, progress, activated=use_activation)

    def encode(
        self,
        prompts: Prompts,
        *,
        pooling_task: str | None = None,
        use_activation: bool = True,
        truncate_prompt_tokens: int | None = None,
        progress: bool | None = None,
    ) -> list[Pooled]:
        """Run the model's own task: ``classify`` for a classifier, else ``embed``; raw numbers without
        ``use_activation``.

        pooling_task: 'token_embed' for an array with a row for each token of the prompt."""
        self._system.spec.use.check("pool", "it pools nothing")
        requests = self._requests
        if pooling_task not in (None, *requests.tasks):
            raise RequestError(f"pooling_task={pooling_task!r:.100}: must be one of {', '.join(requests.tasks)}")
        every = requests.prompts(_as_prompts(prompts))
        return self._pool(every, truncate_prompt_tokens, progress, activated=use_activation, task=pooling_task)

    def score(
        self,
        text_1: str | Sequence[str],
        text_2: str | Sequence[str],
        *,
        use_activation: bool = True,
        truncate_prompt_tokens: int | None = None,
        progress: bool | None = None,
    ) -> list[float]:
        """Return how well each text of ``text_2`` fits ``text_1``: a reranker's score or the cosine of embeddings.

        text_1: one text, or one for each of ``text_2``.
        Raises RequestError for a model that is not a reranker and has no embeddings, and as ``embed`` does."""
        self._system.spec.use.check("score", "it scores no pairs of texts")
        queries, documents = ([one] if isinstance(one, str) else list(one) for one in (text_1, text_2))
        outputs = self._pool(
            self._requests.pairs(queries, documents), truncate_prompt_tokens, progress, activated=False
        )
        return self._requests.scores([one.data for one in outputs], len(queries), activated=use_activation)

    def stream(
        self, prompt: str | Sequence[int] | Sequence[Message], params: SamplingParams | None = None
    ) -> Iterator[Delta]:
        """Yield output as it comes; a list of messages is a conversation.  Leaving the loop cancels the request."""
        (one,) = _as_conversations(prompt) if _is_conversation(prompt) else _as_prompts(prompt)  # type: ignore[arg-type]
        stream = self._await(_call(lambda: self._system.ingress.open(one, params or SamplingParams())))
        try:
            while True:
                delta = self._await(stream.next())
                yield delta
                if delta.finish != Finish.RUNNING:
                    return
        finally:
            self._loop.call_soon_threadsafe(stream.close)

    @property
    def weights(self) -> "RunningWeights":
        """The weights: ``update``, ``pause``, ``resume`` and ``state``."""
        from engine.features.weight_updates.running import RunningWeights  # a feature, whose folder may be absent

        return RunningWeights(self._system.features, self._await)

    def close(self) -> None:
        """Cancel open requests and end the engine's threads; idempotent."""
        self._finalizer()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def _requests(self) -> "PooledRequests":
        from engine.features.pooling.requests import PooledRequests  # a feature, whose folder may be absent

        return PooledRequests(self._system.spec.use, self.max_model_len)

    def _pool(
        self,
        prompts: Sequence[Prompt],
        truncate: int | None,
        progress: bool | None,
        *,
        dimensions: int | None = None,
        activated: bool = True,
        task: str | None = None,
    ) -> list[Pooled]:
        requests = self._requests
        method = None if task in (None, requests.tasks[0]) else task
        params, options = [requests.params(method)] * len(prompts), requests.options(truncate)
        with self._bar(len(prompts), "pooling", progress) as bar:
            deltas = self._await(self._complete_all(prompts, params, bar, options))
        outputs = []
        for prompt, delta in zip(prompts, deltas, strict=True):
            assert delta.usage is not None, "the last delta carries the usage"
            data = requests.result(delta.result, dimensions=dimensions, activated=activated, task=task)
            label = requests.label(data) if requests.pooling.labels else ""
            outputs.append(Pooled(prompt, data, label, delta.usage))
        return outputs

    def _run_batch(self, prompts: Sequence[Prompt], params: Params | None, progress: bool | None) -> list[Completion]:
        every = [params or SamplingParams()] * len(prompts) if not isinstance(params, Sequence) else list(params)
        for one in every:
            if not isinstance(one, SamplingParams):
                raise RequestError(f"params: must be one SamplingParams, or one per prompt, not {one!r:.100}")
        if len(every) != len(prompts):
            raise RequestError(f"{len(prompts)} prompts but {len(every)} sampling parameters; give one, or one each")
        with self._bar(len(prompts), "generating", progress) as bar:
            deltas = self._await(self._complete_all(prompts, every, bar))
        outputs = zip(prompts, deltas, every, strict=True)
        return [_completion(prompt, delta, one.generates) for prompt, delta, one in outputs]

    def _bar(self, num_prompts: int, what: str, progress: bool | None) -> "tqdm[Any]":
        """Return a bar for several prompts, unless they are refused at once; only on a terminal unless ``progress``."""
        wanted = None if progress is None and self._progress else not progress
        return tqdm(total=num_prompts, desc=what, unit="prompt", disable=num_prompts < 2 or wanted, delay=BAR_AFTER_S)

    async def _complete_all(
        self,
        prompts: Sequence[Prompt],
        params: Sequence[SamplingParams],
        bar: "tqdm[Any]",
        options: RequestOptions = DEFAULT_OPTIONS,
    ) -> list[Delta]:
        places = asyncio.Semaphore(self.config.limits.max_requests)
        num_tokens = 0

        async def complete(prompt: Prompt, one: SamplingParams) -> Delta:
            nonlocal num_tokens
            async with places:
                stream = self._system.ingress.open(prompt, one, options)
                delta = await _collect(stream)
            assert delta.usage is not None, "the last delta carries the usage"
            num_tokens += delta.usage.prompt_tokens if options.prompt_only else delta.usage.completion_tokens
            bar.set_postfix_str(f"{num_tokens} tokens", refresh=False)
            bar.update()
            return delta

        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(complete(*pair)) for pair in zip(prompts, params, strict=True)]
        except* Exception as errors:
            raise errors.exceptions[0] from None
        return [task.result() for task in tasks]

    def _await(self, work: Coroutine[Any, Any, T]) -> T:
        """Run work on the engine's loop and wait for it here."""
        if not self._finalizer.alive:  # a loop that is not running may be one whose thread has not begun yet
            work.close()
            raise RuntimeError("this LLM is closed")
        future: Future[T] = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            while True:
                try:
                    return future.result(timeout=STREAM_POLL_S)
                except TimeoutError:
                    if future.done():
                        raise
                    if not self._finalizer.alive and not self._thread.is_alive():
                        raise RuntimeError("this LLM was closed meanwhile") from None
        except KeyboardInterrupt:
            future.cancel()
            raise


async def _collect(stream: Stream) -> Delta:
    try:
        return await stream.collect()
    finally:
        stream.close()


def _completion(prompt: Prompt, delta: Delta, generates: bool) -> Completion:
    assert delta.usage is not None, "the last delta carries the usage"
    return Completion(
        prompt=prompt,
        text=delta.text,
        token_ids=np.frombuffer(delta.token_ids, dtype=np.int32).tolist(),
        finish_reason=delta.finish.name.lower(),
        stop_reason=delta.stop_reason,
        usage=delta.usage,
        logprobs=delta.logprobs,
        prompt_logprobs=delta.prompt_logprobs,
        weight_versions=tuple(versions(delta.result)) if generates else (),
    )


async def _call(function: Callable[[], T]) -> T:
    return function()


def _as_prompts(prompts: Prompts) -> list[Prompt]:
    given: Any = prompts.tolist() if isinstance(prompts, np.ndarray) else prompts
    if isinstance(given, str) or not isinstance(given, Sequence):  # ingress refuses anything that is not a prompt
        return [given]
    return [given] if len(given) > 0 and isinstance(given[0], Real) else list(given)


def _is_conversation(prompt: object) -> bool:
    return isinstance(prompt, Sequence) and len(prompt) > 0 and isinstance(prompt[0], Mapping)


def _as_conversations(conversations: Conversations) -> list[Prompt]:
    several: Sequence[Any] = [conversations] if _is_conversation(conversations) else conversations
    if not isinstance(several, Sequence) or not all(isinstance(turns, Sequence) for turns in several):
        raise RequestError(f"messages: expected a conversation or several, not {conversations!r:.100}")
    return [*read_conversations(several)]


def _run_loop(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    loop.run_forever()
    loop.run_until_complete(loop.shutdown_default_executor())
    loop.close()


def _shut_down(loop: asyncio.AbstractEventLoop, thread: threading.Thread, system: System) -> None:
    asyncio.run_coroutine_threadsafe(system.stop(), loop).result(timeout=60)
    loop.call_soon_threadsafe(loop.stop)
    thread.join(timeout=60)
