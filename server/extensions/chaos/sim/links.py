"""Links between actors: each message arrives after a delay of its own, in order per link, in any order between links.

Owns: messages under way.  Does not know: what they do.  A delay is keyed by the link and by what the message says, so
it stays the same when other operations are removed from a scenario.
"""

import asyncio
import zlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from struct import pack

from msgspec.msgpack import encode

from engine.actors.actor import Mailbox
from engine.messages import Abort, Admit, Deltas, Failed, Step, StepDone, Stop, Tokenize, Tokens
from engine.types.notices import Message, Stats
from server.extensions.chaos.sim.luck import luck

GAP_S = 1e-4  # between the messages that a resumed link lets go of: a stalled channel, not a pile on the doormat


@dataclass(frozen=True, slots=True)
class LinkWeather:
    """The behaviour of links in one run.  usual_s: mean delay.  late: share of messages that take ``late_s`` instead.
    twice: share of aborts that arrive twice.  order: another number gives other delays."""

    seed: int
    order: int = 0
    usual_s: float = 0.001
    late: float = 0.0
    late_s: float = 0.05
    twice: float = 0.0


class SimLink:
    """One sender's way to one mailbox.

    watch: sees each message when it is put.  op_of: request id -> the operation it came from, which keys its luck.
    """

    def __init__(
        self,
        number: int,
        name: str,
        target: Mailbox[Message],
        weather: LinkWeather,
        op_of: Callable[[int], int],
        watch: Callable[[str, Message], None],
    ) -> None:
        self.name = name
        self.digest = 0
        self._number = number
        self._target = target
        self._weather = weather
        self._op_of = op_of
        self._watch = watch
        self._under_way: deque[tuple[float, Message | Callable[[], None]]] = deque()
        self._paused = 0
        self._num_due = 0
        self._letting_go = False

    def __len__(self) -> int:
        """Messages under way."""
        return len(self._under_way)

    def put(self, message: Message) -> None:
        """Send."""
        self._watch(self.name, message)
        key = self._key(message)
        loop = asyncio.get_running_loop()
        self.digest = zlib.crc32(pack("<d", loop.time()), zlib.crc32(encode(message), self.digest))
        self._send(message, self._delay_s(key))
        if isinstance(message, Abort) and luck(self._weather.seed, self._number, key, 2) < self._weather.twice:
            self._send(message, self._delay_s(key + 1))

    def pause(self) -> None:
        """Let nothing through until as many ``resume``."""
        self._paused += 1

    def resume(self) -> None:
        self._paused -= 1
        self._let_go()

    def call_behind(self, callback: Callable[[], None]) -> None:
        """Call when everything sent so far has arrived."""
        self._send(callback, 0.0)

    def _send(self, message: Message | Callable[[], None], delay_s: float) -> None:
        loop = asyncio.get_running_loop()
        due = loop.time() + delay_s
        if self._under_way:
            due = max(due, self._under_way[-1][0])
        self._under_way.append((due, message))
        if due > loop.time():
            loop.call_at(due, self._arrive)
        else:
            self._arrive()

    def _arrive(self) -> None:
        """The message that has been under way longest is due, or one behind it."""
        self._num_due += 1
        if not self._paused and not self._letting_go:
            self._deliver()

    def _deliver(self) -> None:
        self._num_due -= 1
        _, message = self._under_way.popleft()
        if isinstance(message, Message):
            self._target.put(message)
        else:
            message()

    def _let_go(self) -> None:
        """Deliver the messages that fell due during a pause, one by one."""
        self._letting_go = not self._paused and self._num_due > 0
        if self._letting_go:
            self._deliver()
            asyncio.get_running_loop().call_later(GAP_S, self._let_go)

    def _delay_s(self, key: int) -> float:
        weather = self._weather
        draw = luck(weather.seed, weather.order, self._number, key)
        if draw < weather.late:
            return weather.late_s * draw / weather.late
        return weather.usual_s * 2 * draw

    def _key(self, message: Message) -> int:
        match message:
            case Step() | StepDone() | Stats():
                return message.step_id + 1 & 0xFFFFFFFF
            case Tokens():
                return zlib.crc32(message.token_ids, len(message.finishes))
            case Deltas():
                return zlib.crc32(message.deltas[0].token_ids, self._op_of(message.deltas[0].request_id))
            case Tokenize() | Admit() | Abort() | Failed():
                return self._op_of(message.request_id)
            case _:
                return 0


class SimMailbox(Mailbox[Message]):
    """A mailbox that a supervisor may put a Stop into: it arrives after everything sent to the mailbox before it.

    That holds by itself where links are mailboxes; here messages may still be under way.  ``links``: those to here."""

    def __init__(self, name: str, capacity: int) -> None:
        super().__init__(name, capacity)
        self.links: list[SimLink] = []

    def put(self, message: Message) -> None:
        if not isinstance(message, Stop):
            super().put(message)
            return
        busy = [link for link in self.links if len(link)]
        missing = len(busy)

        def count() -> None:
            nonlocal missing
            missing -= 1
            if missing <= 0:
                super(SimMailbox, self).put(message)

        for link in busy:
            link.call_behind(count)
        if not busy:
            count()
