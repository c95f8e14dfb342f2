"""GET /explain/{id}: where the time of one request went, in parts that add up to it.

Owns: the parts outside of the engine, the shape of the JSON, a sentence for each part, and which client may see what.
Does not know: how the engine works its parts out (``engine/features/explain/explanation.py``).
The parts cut the time from a request's first byte to the last one of its answer: they overlap nowhere and leave nothing
out.  Of several choices the one that ended last is explained.  A viewer sees the requests of their own key, an operator
all; other clients' requests that had a share in one are counted with it, and not named.
"""

import time
from collections.abc import Callable, Mapping
from typing import Literal

import msgspec
from aiohttp import web

from engine.features.explain.explanation import Explained, PartName, TimeShare
from engine.features.explain.watcher import asked_for, explained_in
from engine.messages import Finish
from engine.types.errors import RequestError
from server.backend import Backend
from server.clients import MOST_ENDED, ClientRequest, Clients
from server.extensions.explain.difference import DifferenceBody, difference_body
from server.http.exchange import EXCHANGE
from server.http.operation import operation
from server.http.replies import json_reply

OutsideName = Literal[
    "accepting", "receiving", "waiting", "tokenizing", "grammar", "slow_reader", "delivery", "unknown"
]
SHOWN_S = 0.0005  # reasons of less are left out of sentences
UNDER_WAY = 2  # steps that are planned before the request can be in one
SLOW_STEPS = {
    "copies": "copied pages between the tiers of the cache before them",
    "host": "were planned late, with the device waiting for the host",
    "device": "took longer on the device, and nothing else is known of them",
}


class OtherBody(msgspec.Struct, frozen=True, kw_only=True):
    """Another request of the viewer's that had a share in a part.  id: as for ``ExplanationBody``.

    number: the engine's for it.  amount: seconds that it held a row in 'queue', else tokens of its prompt."""

    id: str
    number: int
    amount: float


class PartBody(msgspec.Struct, frozen=True, kw_only=True):
    """A share of the request's time.  text: a sentence on it.  reasons: what it says in numbers, mostly seconds."""

    name: PartName | OutsideName
    seconds: float
    text: str
    reasons: dict[str, float]
    others: list[OtherBody]


class MissedBody(msgspec.Struct, frozen=True, kw_only=True):
    """Pages of the prompt that were cached until another request evicted them; a stranger's has no name."""

    id: str | None
    number: int | None
    pages: int


class ChoiceBody(msgspec.Struct, frozen=True, kw_only=True):
    """One choice in the engine.  seconds: from when it was opened to its end.  finish: None while it runs.

    weight_versions: as in chat completions; empty before weights have changed."""

    number: int
    seconds: float
    finish: str | None
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int | None
    retractions: int
    weight_versions: list[tuple[int, str]] = []


class ExplanationBody(msgspec.Struct, frozen=True, kw_only=True):
    """A request.  id: its X-Request-Id.  names: what else it is called, such as the id of its answer.

    seconds: from its first byte to the last byte of its answer, or until now; the sum of all parts.
    number: of the choice that the parts are of, which is the one that ended last; None if the engine knows none.
    notes: what was changed in it before the model got it.
    missed: see ``MissedBody``.  difference: from a turn of its session.
    choices: of those that were opened first and last; num_choices: of all."""

    id: str
    names: list[str]
    client: str
    notes: list[str] = []
    ended: bool
    seconds: float
    number: int | None
    parts: list[PartBody]
    missed: list[MissedBody]
    difference: DifferenceBody | None = None
    choices: list[ChoiceBody]
    num_choices: int


class ExplainRoute:
    """Handles the route.  clock: seconds, the same as the engine's."""

    def __init__(self, backend: Backend, clients: Clients, clock: Callable[[], float] = time.monotonic) -> None:
        self._monitor = backend.monitor
        self._codec = backend.codec
        self._clients = clients
        self._clock = clock

    @operation(
        "GET", "/explain/{id:.+}", "client", "Where the time of a request went.", answer=ExplanationBody, gathered=True
    )
    async def get(self, request: web.Request) -> web.Response:
        """Explain a request.  Raises RequestError: 404 if it is not known here, or not to this client."""
        name = request.match_info["id"]
        mine = self._clients.known_to(request[EXCHANGE].key)
        one = next((one for one in reversed(mine) if one.choices and one.is_called(name)), None)
        if one is None:
            raise RequestError(
                f"no request of yours is known by this id; of those that have ended the last are kept, {MOST_ENDED} of "
                "all clients, until the server starts again. An id is a request's X-Request-Id or that of its answer",
                status=404,
                code="request_not_found",
                param="id",
            )
        seen = await self._monitor.look(views=asked_for([number for number, _ in one.choices]))
        names = {number: other.exchange.id for other in mine for number, _ in other.choices}
        told = explained_in(seen.views)
        body = explained(one, told, names, self._clock(), seen.gauges.max_running)
        found = next((choice.difference for choice in told if choice.difference is not None), None)
        if found is not None:
            turn = next((a for a in mine for number, _ in a.choices if number == found.request_id), None)
            # An address may be that of many clients, as behind a proxy, so only a key shows what its requests said.
            shows = one.exchange.key is not None and one.exchange.key == request[EXCHANGE].key
            difference = difference_body(found, one, turn, self._codec, shows=shows)
            body = msgspec.structs.replace(body, difference=difference)
        response = json_reply(body)
        response.headers["Cache-Control"] = "no-store"
        return response


def explained(
    one: ClientRequest, told: tuple[Explained, ...], names: Mapping[int, str], now: float, max_running: int
) -> ExplanationBody:
    """Returns the explanation.

    ``told``: what the engine knows of its choices.  names: of requests that may be named."""
    exchange, opened_at = one.exchange, dict(one.choices)
    until = now if exchange.ended_at is None else exchange.ended_at
    last = max(told, key=lambda choice: choice.until, default=None)
    parts = _Parts(exchange.arrived_at, until)
    parts.add("accepting", exchange.received_at, "It was there, and the server's event loop was busy with others.")
    missed: list[MissedBody] = []
    if last is None:
        _add_way_in(parts, one, one.choices[-1][1])
        parts.add("unknown", until, "The engine knows nothing of it: it was refused there, or is forgotten.")
    else:
        _add_way_in(parts, one, opened_at[last.request_id])
        _add_life(parts, last, exchange.waits, names, max_running)
        missed = [
            MissedBody(id=names.get(who), number=who if who in names else None, pages=count)
            for who, count in last.missed.items()
        ]
    return ExplanationBody(
        id=exchange.id,
        names=sorted(exchange.names | exchange.parts.keys())[:16],
        client=exchange.client,
        notes=list(exchange.notes),
        ended=exchange.ended_at is not None,
        seconds=round(until - exchange.arrived_at, 6),
        number=None if last is None else last.request_id,
        parts=parts.parts,
        missed=missed,
        choices=[_choice(choice, opened_at[choice.request_id]) for choice in told],
        num_choices=one.num_choices,
    )


def _choice(told: Explained, opened_at: float) -> ChoiceBody:
    return ChoiceBody(
        number=told.request_id,
        seconds=round(told.until - opened_at, 6),
        finish=told.finish.name.lower() if told.finish != Finish.RUNNING else None,
        prompt_tokens=told.num_prompt_tokens,
        cached_tokens=told.num_cached_tokens,
        output_tokens=told.num_output_tokens,
        retractions=told.num_retractions,
        weight_versions=list(told.weight_versions),
    )


class _Parts:
    """Parts in the order of time, each from the end of the one before, none beyond the end of all.  at: of the next."""

    def __init__(self, start: float, end: float) -> None:
        self.parts: list[PartBody] = []
        self.at = start
        self._end = end

    def add(
        self,
        name: PartName | OutsideName,
        until: float,
        text: str,
        reasons: Mapping[str, float] | None = None,
        others: list[OtherBody] | None = None,
    ) -> None:
        """The part that ends at ``until``; it is left out if it took no time."""
        seconds = min(until, self._end) - self.at
        if seconds <= 0:
            return
        self.at += seconds
        rounded = {reason: round(value, 6) for reason, value in (reasons or {}).items()}
        part = PartBody(name=name, seconds=round(seconds, 6), text=text, reasons=rounded, others=others or [])
        self.parts.append(part)


def _add_way_in(parts: _Parts, one: ClientRequest, opened_at: float) -> None:
    if one.exchange.was_received:
        parts.add("receiving", opened_at, "Its headers and its body were read and checked.")
        return
    parts.add("waiting", opened_at, "It was there before the engine was, or before the engine had room for it.")


def _add_life(
    parts: _Parts,
    told: Explained,
    waits: tuple[tuple[float, float], ...],
    names: Mapping[int, str],
    max_running: int,
) -> None:
    encoded_at = told.arrived_at - told.grammar_s
    parts.add("tokenizing", encoded_at, f"Its prompt was made {told.num_prompt_tokens} tokens.")
    parts.add("grammar", told.arrived_at, "The grammar of its output was compiled.")
    for part in told.parts:
        others = [
            OtherBody(id=names[who], number=who, amount=round(share, 6)) for who, share in part.others if who in names
        ]
        text = _sentence(part, told, _named(part.others, names), max_running)
        parts.add(part.name, parts.at + part.seconds, text, part.reasons, others)
    # Output that has waited for the client while the model went on has cost no time.
    waited = sum(max(0.0, until - max(since, parts.at)) for since, until in waits)
    parts.add(
        "slow_reader",
        parts.at + waited,
        "The output was there, and the client did not read it: the connection took no more.",
    )
    parts.add("delivery", float("inf"), "Its last tokens became text and went out.")


def _sentence(part: TimeShare, told: Explained, others: str, max_running: int) -> str:
    """Returns what the numbers of an engine's part say."""
    reasons = part.reasons
    match part.name:
        case "queue":
            told_of = [
                f"all {max_running} rows were taken for {_s(reasons['rows'])}" if _counts(reasons, "rows") else "",
                f"no pages were free for {_s(reasons['pages'])}" if _counts(reasons, "pages") else "",
                f"another request was computing the same prefix for {_s(reasons['aside'])}"
                if _counts(reasons, "aside")
                else "",
                f"{reasons['overtaken_by']:g} that came later were let in first" if reasons.get("overtaken_by") else "",
            ]
            steps = reasons.get("steps", 0)
            turn = "the steps under way came first" if steps <= UNDER_WAY else f"{steps:g} steps were full without it"
            why = "; ".join(filter(None, told_of)) or turn
            ran = f" {reasons.get('running', 0):g} others had rows meanwhile, longest {others}." if others else ""
            return f"It waited for its first step: {why}.{ran}"
        case "fetch":
            return "It waited for pages from the store."
        case "encode":
            return "It waited until its pictures were encoded."
        case "weights":
            return "It waited until its adapter was read from its files."
        case "prefill":
            missed = sum(told.missed.values())
            gone = f" {missed} pages of it had been cached and were evicted." if missed else ""
            again = told.num_recomputed
            stateless = f" {again} more were cached without the model's state behind them." if again else ""
            beside = f" Prompts of {others} were computed meanwhile." if others else ""
            return (
                f"Of its {told.num_prompt_tokens} prompt tokens {told.num_cached_tokens} were cached; "
                f"{reasons.get('tokens', 0):g} were computed in {reasons.get('steps', 0):g} steps, which took "
                f"{_s(reasons.get('computing', 0.0))}.{gone}{stateless}{beside}"
            )
        case "decode":
            return f"{reasons.get('steps', 0):g} steps of the usual length wrote its tokens."
        case "prefills":
            whose = f", of {others}" if others else ""
            return f"{reasons.get('steps', 0):g} of its steps took longer for the prompts in them{whose}."
        case "slow_steps":
            causes = sorted(reasons.items(), key=lambda one: -one[1])
            named = "; ".join(f"some {SLOW_STEPS.get(why, why)} ({_s(seconds)})" for why, seconds in causes)
            return f"Steps took longer than usual: {named}."
        case "retraction":
            return (
                f"It lost its row {told.num_retractions} times, since pages ran out or weights changed: it waited "
                f"{_s(reasons.get('waiting', 0.0))} to come back and spent {_s(reasons.get('again', 0.0))} computing "
                "again what was no longer cached."
            )
        case "recovery":
            return (
                "The model's executors were lost or replaced: "
                f"{_s(reasons.get('unnoticed', 0.0))} until that was noticed, "
                f"{_s(reasons.get('waiting', 0.0))} until new ones took it, {_s(reasons.get('again', 0.0))} for "
                "computing again what they had."
            )


def _counts(reasons: Mapping[str, float], name: str) -> bool:
    return reasons.get(name, 0.0) >= SHOWN_S


def _s(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1000 * seconds:.1f} ms"


def _named(others: tuple[tuple[int, float], ...], names: Mapping[int, str]) -> str:
    known = list(dict.fromkeys(names[who] for who, _ in others if who in names))  # a call may have several choices
    hidden = sum(who not in names for who, _ in others)
    if hidden:
        known.append("another client's" if hidden == 1 else f"{hidden} of other clients")
    return ", ".join(known)
