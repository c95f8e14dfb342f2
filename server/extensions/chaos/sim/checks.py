"""The rules that hold in every run, at every step and at its end.

Owns: what was promised, and whether it was kept.  Does not know: how a run is driven.
Raises SimIncorrect; a message names the operation, so that the replayed run can be searched for it.
"""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from engine.messages import Abort, Admit, Deltas, Failed, Finish, Step, Tokens
from engine.scheduling.meter import RequestMetrics
from engine.types.errors import EngineDied, RequestError
from engine.types.notices import Message
from server.extensions.chaos.sim.client import SimClient
from server.extensions.chaos.sim.codec import ALPHABET, text_of
from server.extensions.chaos.sim.device import logprob_of
from server.extensions.chaos.sim.failures import SimIncorrect
from server.extensions.chaos.sim.oracle import as_prompt, continuation
from server.extensions.chaos.sim.probe import Probe
from server.extensions.chaos.sim.scenario import SimSetup, Submit
from server.extensions.chaos.sim.shares import OUTPUT_COST, Shares


class Expected(NamedTuple):
    """The answer to a request that nothing disturbs."""

    tokens: list[int]
    text: str
    finish: Finish
    stop_reason: str | int | None


def expect(op: Submit, setup: SimSetup) -> Expected:
    """The oracle's output, cut where the request says."""
    most = op.max_tokens if op.max_tokens is not None else setup.longest - len(op.prompt)
    stop_ids = {*op.stop_token_ids, *(() if op.ignore_eos else setup.eos_token_ids)}
    special = set(setup.eos_token_ids)
    text, tokens = "", []
    for token in continuation(as_prompt(op.prompt), most, op.adapter):
        tokens.append(token)
        stops = token in stop_ids
        if not stops or op.include_stop:
            text += "" if token in special else ALPHABET[token]
            # A character per token, so a stop string always ends with the text so far.
            found = max((stop for stop in op.stop if text.endswith(stop)), key=len, default="")
            if found and token not in special:
                shown = text if op.include_stop else text[: -len(found)]
                return Expected(tokens, shown, Finish.STOP, found)
        if stops:
            named = token in op.stop_token_ids and not op.include_stop
            return Expected(tokens, text, Finish.STOP, token if named else None)
    return Expected(tokens, text, Finish.LENGTH, None)


def never_fits(op: Submit, setup: SimSetup) -> bool:
    """Whether the request could not run in an empty pool."""
    return len(op.prompt) >= setup.longest or len(op.prompt) + (op.max_tokens or 0) > setup.longest


class Checks:
    """Watches one run."""

    def __init__(self, setup: SimSetup) -> None:
        self._setup = setup
        self._ended: dict[str, set[int]] = {"scheduler>tokenizer": set(), "tokenizer>ingress": set()}
        self._overtaken: Counter[int] = Counter()
        self._num_tokens: Counter[int] = Counter()
        self._ends: dict[int, Finish] = {}
        self._metrics: dict[int, RequestMetrics] = {}
        self._num_flushes = 0
        self._shares = Shares(OUTPUT_COST * setup.max_running * (setup.overlap + 1))
        # Request ids that the tokenizer has sent to the scheduler, to be admitted and to be aborted.
        self._admitted: set[int] = set()
        self._aborted: set[int] = set()

    # ---- at every message -------------------------------------------------------------------

    def watch(self, link: str, message: Message) -> None:
        """Each request ends once on each link of its way back, and nothing of it comes later."""
        if link == "tokenizer>scheduler":
            self._watch_admissions(message)
        elif link in self._ended:
            self._watch_ends(link, self._ended[link], message)

    def _watch_admissions(self, message: Message) -> None:
        match message:
            case Admit():
                self._admitted.add(message.request_id)
            case Abort():
                self._aborted.add(message.request_id)
            case _:
                pass

    def _watch_ends(self, link: str, ended: set[int], message: Message) -> None:
        match message:
            case Tokens():
                ids = np.frombuffer(message.request_ids, dtype=np.int64).tolist()
                tokens = np.frombuffer(message.token_ids, dtype=np.int32).tolist()
                for request_id, token, finish in zip(ids, tokens, message.finishes, strict=True):
                    self._speak(link, ended, request_id, bool(finish))
                    self._num_tokens[request_id] += token >= 0
                    if token >= 0:
                        self._shares.served(request_id, OUTPUT_COST)
                    if finish:
                        self._ends[request_id] = Finish(finish)
            case Deltas():
                for delta in message.deltas:
                    self._speak(link, ended, delta.request_id, delta.finish != Finish.RUNNING)
            case Failed():
                self._speak(link, ended, message.request_id, True)
                if link == "scheduler>tokenizer" and message.code == "nonfinite_logits":
                    self._ends[message.request_id] = Finish.ERROR
            case _:
                pass

    def _speak(self, link: str, ended: set[int], request_id: int, ends: bool) -> None:
        if request_id in ended:
            raise SimIncorrect(f"{link}: request {request_id} {'ends again' if ends else 'goes on'} after its end")
        if ends:
            ended.add(request_id)

    # ---- at every plan ----------------------------------------------------------------------

    def planned(self, step: Step, probe: Probe) -> None:
        """No request starts before those whose turn comes first, unless suspects run alone, which wait for no turn."""
        if probe.is_in_quarantine:
            self._shares.waits.clear()
            return
        started = probe.started(step)
        policy = self._setup.policy
        waiting = list(probe.waiting()) if started or policy == "fair" else []
        if policy == "fair":
            self._shares.planned(step, started, waiting)
        for sequence in started:
            for other in waiting:
                if policy == "fair" and other.tenant != sequence.tenant:
                    continue
                if policy == "fcfs" and other.arrival > sequence.arrival:
                    continue
                if policy != "fcfs" and (other.priority, other.arrival) > (sequence.priority, sequence.arrival):
                    continue
                if policy == "lpm" and other.priority == sequence.priority:
                    self._overtaken[other.arrival] += 1
                    if self._overtaken[other.arrival] <= self._setup.max_overtaken + self._setup.max_running:
                        continue
                raise SimIncorrect(
                    f"step {step.step_id}: request {sequence.request_id} starts before {other.request_id}, "
                    f"which waits and whose turn is first ({policy})"
                )

    def flushed(self, probe: Probe) -> None:
        """Every page has one owner: sizes each time, the whole books now and then."""
        counts = probe.page_counts
        if sum(counts) != probe.num_pages:
            raise SimIncorrect(f"{probe.num_pages} pages, but free, cached, private, deferred are {counts}")
        self._num_flushes += 1
        if self._num_flushes % self._setup.check_every == 0:
            self.check_books(probe)

    def check_books(self, probe: Probe) -> None:
        """The planner's own checks, and what it believes of the cache for those that wait."""
        try:
            probe.planner.check()
            probe.check_states()
        except AssertionError as error:
            raise SimIncorrect(f"planner.check: {error}") from error
        for sequence in probe.waiting():
            if (ahead := probe.looked_ahead(sequence)) != (cached := probe.cached_tokens(sequence)):
                raise SimIncorrect(
                    f"request {sequence.request_id}: looks ahead at {ahead} cached tokens, but there are {cached} "
                    f"under its salt {sequence.cache_salt!r}"
                )

    def finished(self, requests: Sequence[RequestMetrics]) -> None:
        """Observers are called once for each request."""
        for metrics in requests:
            if metrics.request_id in self._metrics:
                raise SimIncorrect(f"observers were called twice for the end of request {metrics.request_id}")
            self._metrics[metrics.request_id] = metrics

    # ---- at the end -------------------------------------------------------------------------

    def check_metrics(self) -> None:
        """Observers and the tokenizer got the same ends, and no cancellation was lost on its way."""
        for request_id in self._admitted - self._aborted - self._ended["tokenizer>ingress"]:
            raise SimIncorrect(f"request {request_id} was cancelled, and the scheduler never got that")
        for request_id, finish in self._ends.items():
            metrics = self._metrics.get(request_id)
            if metrics is None or metrics.finish != finish:
                raise SimIncorrect(f"request {request_id} ended as {finish.name}, observers got {metrics}")
            if metrics.num_output_tokens != self._num_tokens[request_id]:
                raise SimIncorrect(f"request {request_id}: {self._num_tokens[request_id]} tokens sent, {metrics}")

    def check_client(
        self, client: SimClient, nan_token: int | None, causes: set[str], fatal_token: int | None = None
    ) -> None:
        """A client got what it was promised.  causes: what happened that may have ended it early.

        fatal_token: of its output, which no device survives."""
        op, where = client.op, f"operation {client.number}"
        if client.refusal is not None:
            self._check_refusal(client, causes)
            return
        elapsed_s, timeout_s = client.ended_at - client.opened_at, self._setup.request_timeout_s
        if elapsed_s > timeout_s + 1e-6 and "clock jump" not in causes:
            raise SimIncorrect(f"{where}: ended {elapsed_s:g} s after its start, its deadline was {timeout_s:g} s")
        if client.num_terminals != (not client.cancelled):
            raise SimIncorrect(f"{where}: {client.num_terminals} terminal events, cancelled={client.cancelled}")
        if not op.prompt or never_fits(op, self._setup):
            self._check_prefix(client, Expected([], "", Finish.RUNNING, None), whole=False)
            if not client.cancelled and not self._has_failed(client, causes):
                raise SimIncorrect(f"{where}: can never run, and ended with {client.finish.name}, {client.error}")
            return
        expected = expect(op, self._setup)
        is_nan = nan_token is not None and nan_token < len(expected.tokens)
        if is_nan:
            # The text before the token that failed, but for what may be the beginning of a stop string.
            expected = expected._replace(tokens=expected.tokens[:nan_token])
        is_fatal = fatal_token is not None and fatal_token < len(expected.tokens)
        if is_fatal:
            expected = expected._replace(tokens=expected.tokens[:fatal_token])
        whole = not client.cancelled and client.error is None
        if whole and is_fatal:
            raise SimIncorrect(f"{where}: token {fatal_token} ends every device, and finished as {client.finish.name}")
        if whole and is_nan:
            raise SimIncorrect(f"{where}: NaN at token {nan_token}, and finished as {client.finish.name}")
        self._check_prefix(client, expected, whole=whole)
        self._check_logprobs(client)
        if whole:
            self._check_end(client, expected)
        elif client.error is not None:
            error = client.error
            if isinstance(error, RequestError) and error.code == "nonfinite_logits":
                if not is_nan or (op.reader != "collect" and len(client.tokens) != nan_token):
                    raise SimIncorrect(f"{where}: failed for NaN after {len(client.tokens)} tokens, due {nan_token}")
            elif isinstance(error, RequestError) and error.code == "executors_lost":
                # Executors that are lost again and again, by chance, may make a request look guilty.
                if not is_fatal and "executors lost" not in causes:
                    raise SimIncorrect(f"{where}: blamed for a loss that it has not brought")
            elif not self._has_failed(client, causes) or (
                isinstance(error, RequestError) and error.code in ("context_length_exceeded", "invalid_value")
            ):
                raise SimIncorrect(f"{where}: failed without a cause: {type(error).__name__}: {error}")

    def _check_refusal(self, client: SimClient, causes: set[str]) -> None:
        error, op = client.refusal, client.op
        assert error is not None
        due = {
            "not_ready": "loading",
            "draining": "drain",
            "engine_died": "crash",
            "queue_full": "full",
        }
        if error.code in due:
            if due[error.code] not in causes:
                raise SimIncorrect(f"operation {client.number}: refused, {error.code}, without a cause")
        elif op.prompt and len(op.prompt) <= self._setup.max_len:
            raise SimIncorrect(f"operation {client.number}: refused for no reason: {error}")
        elif not 400 <= error.status < 500:
            raise SimIncorrect(f"operation {client.number}: refused with status {error.status}")

    def _has_failed(self, client: SimClient, causes: set[str]) -> bool:
        """Whether the client's error has a cause in the scenario."""
        match client.error:
            case EngineDied():
                return "crash" in causes
            case RequestError(code="request_timeout"):
                return "timeout" in causes
            case RequestError(code="shutting_down"):
                return "drain" in causes
            case RequestError(status=400):
                return True
            case _:
                return False

    def _check_prefix(self, client: SimClient, expected: Expected, *, whole: bool) -> None:
        where = f"operation {client.number}"
        tokens = expected.tokens[: len(client.tokens)]
        if client.tokens != tokens or (whole and len(client.tokens) != len(expected.tokens)):
            at = next((i for i, (a, b) in enumerate(zip(client.tokens, tokens, strict=False)) if a != b), len(tokens))
            raise SimIncorrect(
                f"{where}: token {at} of {len(client.tokens)} is {client.tokens[at : at + 3]}..., "
                f"expected {expected.tokens[at : at + 3]}... of {len(expected.tokens)}"
            )
        text = "".join(client.texts)
        if client.op.echo and text:
            prompt = text_of(client.op.prompt)
            if client.op.kind != "text":
                special = set(self._setup.eos_token_ids)
                prompt = text_of([token for token in client.op.prompt if token not in special])
            if not text.startswith(prompt):
                raise SimIncorrect(f"{where}: the echo is not the prompt")
            text = text[len(prompt) :]
        if not expected.text.startswith(text) or (whole and text != expected.text):
            raise SimIncorrect(f"{where}: text {text!r}, expected {expected.text!r}")

    def _check_logprobs(self, client: SimClient) -> None:
        if not client.op.logprobs:
            return
        entries = [(entry.sampled.token_id, entry.sampled.logprob, entry.top[0].token_id) for entry in client.logprobs]
        start = len(client.op.prompt)
        expected = [(token, logprob_of(token, start + i), token) for i, token in enumerate(client.tokens)]
        if entries != expected:
            raise SimIncorrect(f"operation {client.number}: log probabilities {entries}, expected {expected}")

    def _check_end(self, client: SimClient, expected: Expected) -> None:
        where, usage = f"operation {client.number}", client.usage
        if (client.finish, client.stop_reason) != (expected.finish, expected.stop_reason):
            raise SimIncorrect(
                f"{where}: ends with {client.finish.name} {client.stop_reason!r}, "
                f"expected {expected.finish.name} {expected.stop_reason!r}"
            )
        counts = (len(client.op.prompt), len(expected.tokens))
        if usage is None or (usage.prompt_tokens, usage.completion_tokens) != counts:
            raise SimIncorrect(f"{where}: {usage}, expected {counts}")
        if client.first_usage is None or client.first_usage.cached_tokens != usage.cached_tokens:
            raise SimIncorrect(f"{where}: cached tokens changed, {client.first_usage} and {usage}")
        num_rest = usage.prompt_tokens - usage.cached_tokens - usage.created_tokens
        if usage.created_tokens % self._setup.page_size or num_rest < 0:
            raise SimIncorrect(f"{where}: {usage.created_tokens} tokens were put into the cache, {usage}")

    def check_sharing(self, clients: Sequence[SimClient]) -> None:
        """No client has found more in the cache than one of the same salt and adapter could have left there."""
        page = self._setup.page_size
        texts: dict[int, np.ndarray] = {}

        def whole(client: SimClient) -> np.ndarray:
            if client.number not in texts:
                prompt = as_prompt(client.op.prompt)
                most = max(0, self._setup.longest - len(prompt))
                count = min(client.op.max_tokens or most, most)
                said = continuation(prompt, count, client.op.adapter) if len(prompt) else []
                texts[client.number] = np.concatenate((prompt, as_prompt(said)))
            return texts[client.number]

        for client in clients:
            cached = client.usage.cached_tokens if client.usage is not None else 0
            if not cached:
                continue
            prompt = as_prompt(client.op.prompt)
            if cached % page or cached >= len(prompt):
                raise SimIncorrect(
                    f"operation {client.number}: {cached} of {len(prompt)} tokens cached, pages of {page}"
                )
            mine = client.op.salt, client.op.adapter
            others = (one for one in clients if one is not client and (one.op.salt, one.op.adapter) == mine)
            if not any(np.array_equal(whole(other)[:cached], prompt[:cached]) for other in others):
                raise SimIncorrect(
                    f"operation {client.number}: {cached} tokens cached that no client with salt and adapter {mine} "
                    "ever sent"
                )
