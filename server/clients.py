"""The clients: what each may have open at once and use in a minute, and which cached prefixes it sees.

Owns: a salt for each key, open requests and rates per client, their names.
Does not know: where keys come from, bodies, what a request costs.
A client is an API key, or an address where there are no keys.  A handler opens requests in the engine through the
``ClientRequest`` of its HTTP request; when that has been answered, the client's share is free again.
"""

import math
import secrets
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence

import msgspec
from aiohttp import web

from engine.actors.admission import Load, check_admission
from engine.messages import DEFAULT_OPTIONS, RequestOptions
from engine.settings.sections import LimitsSection, ServerSection
from engine.types.errors import RequestError
from engine.types.params import SamplingParams
from engine.types.prompt import ChatTurn, Origin, Picture, Prompt
from server.backend import EngineIngress, EngineStream
from server.http.bodies import Bodies, Share
from server.http.exchange import EXCHANGE, Exchange
from server.http.operation import Handler
from server.keys import Key

SALT_BYTES = 16
MAX_IDLE_ALLOWANCES = 4096
MOST_ENDED = 4096  # requests of all clients that are remembered after their end, 2 KB each
LEAST_OUTPUT = 256  # tokens that a choice is expected to give, unless it may give fewer
MOST_CHOICES = 32  # of them, the first and the last ones
PICTURES_OF_ONE = 64  # bodies of the largest size: as much as them the pictures of a client's open requests may have
PICTURES_OF_ALL = 256


class CacheSalts:
    """The salt of each key.  keep: called with those that were renewed when one has changed, as bytes.

    kept: what an earlier process of the same configuration gave to ``keep``, if there was one."""

    def __init__(
        self, server: ServerSection, *, kept: bytes = b"", keep: Callable[[bytes], None] | None = None
    ) -> None:
        # With one key all clients are one; a file of keys may get another one.
        num_keys = 1 if isinstance(server.api_key, str) else sum(map(bool, server.api_key))
        self._share = server.shared_cache or (num_keys < 2 and not server.key_file)
        self._renewed: dict[str, str] = msgspec.msgpack.decode(kept, type=dict[str, str]) if kept else {}
        self._keep = keep

    def of(self, key: Key | None) -> str:
        """Returns the salt of a client with this key."""
        plain = "" if self._share or key is None else key.salt
        return self._renewed.get(plain, plain)

    def renew(self, key: Key | None) -> None:
        """Change the salt of a client, and of those it shares it with: nothing is found any more that was cached."""
        plain = "" if self._share or key is None else key.salt
        self._renewed[plain] = secrets.token_hex(SALT_BYTES)
        if self._keep is not None:
            self._keep(msgspec.msgpack.encode(self._renewed))


class Allowance:
    """The amount that one client may use in a minute: it is full at first, and fills up steadily (a token bucket)."""

    def __init__(self, per_minute: int, now: float) -> None:
        self.left = float(per_minute)
        self._per_minute = per_minute
        self._at = now

    def refill(self, now: float) -> None:
        """Add what has come since the last time."""
        self.left = min(self.left + (now - self._at) * self._per_minute / 60.0, float(self._per_minute))
        self._at = now

    @property
    def is_full(self) -> bool:
        """Whether nothing is missing, so that a new one would be the same."""
        return self.left >= self._per_minute

    def wait_s(self, wanted: float) -> int:
        """Whole seconds until ``wanted`` is there."""
        return max(math.ceil((wanted - self.left) * 60.0 / self._per_minute), 1)


class Charge:
    """The tokens that a client pays for one request: an estimate at first, in the end what the request has used."""

    def __init__(self, rates: "Rates", client: str) -> None:
        self.num_paid = 0
        self._rates = rates
        self._client = client

    def pay(self, num_tokens: int) -> None:
        """Have the client pay so many in all, whatever it has paid for the request so far."""
        self._rates.spend(self._client, num_tokens - self.num_paid)
        self.num_paid = num_tokens


class Rates:
    """Requests and tokens per minute of each client; 0 for no limit.  clock: seconds that only grow."""

    def __init__(self, limits: LimitsSection, clock: Callable[[], float] = time.monotonic) -> None:
        self._limits = {"requests": limits.requests_per_minute, "tokens": limits.tokens_per_minute}
        self._clock = clock
        self._allowances: dict[tuple[str, str], Allowance] = {}
        self._sweep_at = MAX_IDLE_ALLOWANCES

    @property
    def num_remembered(self) -> int:
        """The number of allowances that are kept; those of clients that use nothing are dropped."""
        return len(self._allowances)

    def check(self, client: str) -> None:
        """Raise RequestError (429) if the client has used up its requests or tokens."""
        for what, limit in self._limits.items():
            if limit and (allowance := self._of(client, what)).left < 1.0:
                raise RequestError(
                    f"you have used your {limit} {what} per minute (limits.{what}_per_minute)",
                    status=429,
                    code="rate_limit_exceeded",
                    retry_after_s=allowance.wait_s(1.0),
                )

    def admit(self, client: str) -> Charge:
        """Count a request.  Returns what takes its tokens.  Raises RequestError (429) as ``check`` does."""
        self.check(client)
        if self._limits["requests"]:
            self._of(client, "requests").left -= 1.0
        return Charge(self, client)

    def headers(self, client: str) -> dict[str, str]:
        """Returns the headers that say what is left of a client's minute, by the names of OpenAI's API."""
        told = {}
        for what, limit in self._limits.items():
            if limit:
                allowance = self._of(client, what)
                told[f"x-ratelimit-limit-{what}"] = str(limit)
                told[f"x-ratelimit-remaining-{what}"] = str(max(math.floor(allowance.left), 0))
                told[f"x-ratelimit-reset-{what}"] = f"{0 if allowance.is_full else allowance.wait_s(limit)}s"
        return told

    def spend(self, client: str, num_tokens: int) -> None:
        """Take tokens, or give them back: those that are more than were left are waited for."""
        if self._limits["tokens"]:
            self._of(client, "tokens").left -= num_tokens

    def _of(self, client: str, what: str) -> Allowance:
        now = self._clock()
        if len(self._allowances) > self._sweep_at:
            # Addresses come and go; one that has used nothing for a minute needs no memory.
            for one in self._allowances.values():
                one.refill(now)
            self._allowances = {key: one for key, one in self._allowances.items() if not one.is_full}
            # Twice as many until the next look, so that looking costs little for each client.
            self._sweep_at = max(MAX_IDLE_ALLOWANCES, 2 * len(self._allowances))
        allowance = self._allowances.setdefault((client, what), Allowance(self._limits[what], now))
        allowance.refill(now)
        return allowance


class ClientRequest:
    """One HTTP request of a client, and what it has opened in the engine: a stream for each choice.

    prompts: what each of the streams is the answer to.  opened: called with each stream, if it is set.
    choices: the engine's number of each and when it was opened, monotonic seconds; num_choices: how many there were.
    num_open: of them, those that have not ended."""

    def __init__(self, clients: "Clients", client: str, salt: str, exchange: Exchange) -> None:
        self.exchange = exchange
        self.streams: list[EngineStream] = []
        self.prompts: list[Prompt] = []
        self.opened: Callable[[EngineStream], None] | None = None
        self.choices: list[tuple[int, float]] = []
        self.num_choices = 0
        self.num_open = 0
        self._clients = clients
        self._client = client
        self._charge: Charge | None = None
        self._estimates: list[int] = []  # tokens of each prompt
        self._num_used = 0
        self._pictures: Share | None = None
        self._files: dict[str, int] = {}  # bytes of each picture by its digest
        self._copies: list[tuple[EngineStream, int]] = []  # bytes of pictures that choices have, each for itself
        self._salt = salt
        self._origin = Origin(exchange.client, exchange.id)

    def check_admission(self) -> None:
        """Raise RequestError rather than read a body that would be refused anyway."""
        check_admission(self._clients.ingress, self._clients.limits)

    def admit(self) -> None:
        """Count a request whose work has limits of its own.  Raises RequestError (429) for a client over its rates."""
        self._clients.rates.admit(self._client)

    def open(self, prompt: Prompt, params: SamplingParams, options: RequestOptions = DEFAULT_OPTIONS) -> EngineStream:
        """Open a choice as the engine's ingress does.

        Raises RequestError, also a 429 if the client has its share."""
        if not self.streams:
            try:
                self._charge = self._clients.rates.admit(self._client)
            finally:
                self.exchange.rates = self._clients.rates.headers(self._client)
        Load(num_of_client=self._clients.num_open[self._client]).check(self._clients.limits)
        # Both have a fixed place, so that no client's own salt can make it another's.
        salt = f"{self._salt}:{options.cache_salt}" if self._salt else options.cache_salt
        origin = self._origin
        if self.exchange.key is None and options.origin.tenant:
            origin = msgspec.structs.replace(origin, tenant=options.origin.tenant)
        options = msgspec.structs.replace(options, cache_salt=salt, origin=origin)
        num_copied = self._hold(_pictures(prompt))
        opened_at = time.monotonic()
        stream = self._clients.ingress.open(prompt, params, options)
        self._note_choice(stream.request_id, opened_at)
        self._take(stream.estimated_tokens, prompt, params)
        self._clients.num_open[self._client] += 1
        self.num_open += 1
        self.streams.append(stream)
        self.prompts.append(prompt)
        if num_copied:
            self._copies.append((stream, num_copied))
        if self.opened is not None:
            self.opened(stream)
        return stream

    def _hold(self, pictures: Sequence[Picture]) -> int:
        """Count the pictures of one more choice, and return their bytes.

        The request has each once; a choice has a copy of its own until the engine has begun it."""
        if not pictures:
            return 0
        if self._pictures is None:
            self._pictures = self._clients.pictures.share(self._client, self._clients.server)
        self._files |= {one.digest: len(one.data) for one in pictures}
        self._copies = [(stream, size) for stream, size in self._copies if not stream.has_output]
        num_copied = sum(len(one.data) for one in pictures)
        self._pictures.hold(max(sum(self._files.values()), num_copied + sum(size for _, size in self._copies)))
        return num_copied

    def _take(self, num_prompt: int, prompt: Prompt, params: SamplingParams) -> None:
        """Have the client pay for a choice before it runs: its prompt unless another choice has it, and some output."""
        if self._charge is None:
            return
        num_tokens = LEAST_OUTPUT if params.max_tokens is None else min(params.max_tokens, LEAST_OUTPUT)
        if not self.prompts or self.prompts[-1] is not prompt:
            self._estimates.append(num_prompt)
            num_tokens += num_prompt
        self._charge.pay(self._charge.num_paid + num_tokens)
        self.exchange.rates = self._clients.rates.headers(self._client)

    def used(self, prompts: Sequence[int | None], num_output: int) -> None:
        """Note what it has used.  prompts: tokens of each, None for one that the engine has not counted.

        A prompt that was taken is paid for also if its client has left before that."""
        self.exchange.usage = sum(filter(None, prompts)), num_output
        paid = zip(self._estimates, prompts, strict=False)  # those behind were not opened
        self._num_used = num_output + sum(estimate if told is None else told for estimate, told in paid)

    def _note_choice(self, number: int, opened_at: float) -> None:
        if len(self.choices) == MOST_CHOICES:
            del self.choices[1]
        self.choices.append((number, opened_at))
        self.num_choices += 1

    def choice_ended(self) -> None:
        """Give the place of one choice back, for another that follows it."""
        self._clients.num_open[self._client] -= 1
        self.num_open -= 1

    def close(self) -> None:
        """Give the client's share back."""
        self._clients.closed(self)
        self.exchange.answered()
        num_open = self._clients.num_open
        num_open[self._client] -= self.num_open
        if not num_open[self._client]:
            del num_open[self._client]
        if self._charge is not None:
            self._charge.pay(self._num_used)
        if self._pictures is not None:
            self._pictures.close()
        # What is remembered of it is small.
        self.streams.clear()
        self.prompts.clear()
        self._copies.clear()
        self.opened = None

    def abort(self, name: str | None = None) -> bool:
        """End the choices that are called so, or all, where they are; returns whether one of them was open."""
        part = None if name is None or self._is_whole(name) else self.exchange.parts[name]
        streams = self.streams if part is None else self.streams[part.start : part.stop]
        return sum(self._clients.ingress.abort(stream.request_id) for stream in streams) > 0

    def is_called(self, name: str) -> bool:
        """Whether ``name`` is the request's own id, that of its answer, or that of a part."""
        return self._is_whole(name) or name in self.exchange.parts

    def _is_whole(self, name: str) -> bool:
        return name == self.exchange.id or name in self.exchange.names


CLIENT: web.RequestKey[ClientRequest] = web.RequestKey("client", ClientRequest)


class Clients:
    """Limits and salts of every client that has something open.  ``middleware`` goes after the check of keys.

    num_open: choices by client.  pictures: of open requests.  limits: of now."""

    def __init__(
        self, ingress: EngineIngress, server: ServerSection, limits: LimitsSection, salts: CacheSalts | None = None
    ) -> None:
        self.ingress = ingress
        self.server = server
        self.num_open: Counter[str] = Counter()
        self.pictures = Bodies("pictures", PICTURES_OF_ONE, PICTURES_OF_ALL)
        self._salts = salts or CacheSalts(server)
        self._requests: dict[ClientRequest, None] = {}
        self._ended: dict[str, deque[ClientRequest]] = {}
        self._num_ended = 0
        self.limit(limits)

    def limit(self, limits: LimitsSection) -> None:
        """Have other limits from now on; what clients have used of their minute is forgotten."""
        self.limits = limits
        self.rates = Rates(limits)

    def request(self, exchange: Exchange, account: str = "") -> ClientRequest:
        """Returns a request, which is open until it is closed.  account: whose limits it has; '' for its client's."""
        one = ClientRequest(self, account or exchange.client, self._salts.of(exchange.key), exchange)
        self._requests[one] = None
        return one

    @web.middleware
    async def middleware(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Give every HTTP request the client that it is from, while it is handled."""
        one = request[CLIENT] = self.request(request[EXCHANGE])
        try:
            return await handler(request)
        finally:
            one.close()

    def closed(self, one: ClientRequest) -> None:
        """A request is open no longer."""
        del self._requests[one]
        if not one.choices:
            return
        mine = self._ended.setdefault(one.exchange.client, deque())
        mine.append(one)
        self._num_ended += 1
        if self._num_ended > MOST_ENDED:  # a client that has more than its share makes room by itself
            most = mine if len(mine) > MOST_ENDED // len(self._ended) else max(self._ended.values(), key=len)
            gone = most.popleft()
            self._num_ended -= 1
            if not most:
                del self._ended[gone.exchange.client]

    def abort(self, key: Key | None, name: str | None = None) -> int:
        """End the open requests with this key, or all for an operator's; returns how many.

        name: only those with this name."""
        return sum(one.abort(name) for one in self.of(key) if name is None or one.is_called(name))

    def of(self, key: Key | None) -> list[ClientRequest]:
        """The open requests with this key, or all for an operator's: those that it may end, and see on the board."""
        return [one for one in self._requests if self._may_see(key, one)]

    def known_to(self, key: Key | None) -> list[ClientRequest]:
        """Returns the last requests that have ended, and behind them the open ones, each in the order of time."""
        ended = [one for mine in self._ended.values() for one in mine if self._may_see(key, one)]
        return [*sorted(ended, key=lambda one: one.exchange.received_at), *self.of(key)]

    def _may_see(self, key: Key | None, one: ClientRequest) -> bool:
        return one.exchange.key == key or (key is not None and key.is_operator)

    def forget_cache(self, key: Key | None) -> None:
        """Hide everything cached so far from the later requests of a key, and of those that it shares the cache with.

        Nothing is taken from requests that run; what was cached makes room as what is not used does."""
        self._salts.renew(key)


def _pictures(prompt: Prompt) -> list[Picture]:
    """Return the pictures of a conversation; none of other prompts."""
    if not (isinstance(prompt, tuple) and prompt and isinstance(prompt[0], ChatTurn)):
        return []
    return [picture for turn in prompt for picture in turn.pictures]
