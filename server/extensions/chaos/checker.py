"""An independent checker: it reads the log of a run and decides whether the service kept its promises.

    python server/extensions/chaos/checker.py LOG

It imports nothing of callboard, so that the proof does not rest on the code that it proves.  It has its own copy of the
arithmetic of the simulated model, from the definition: a token's entry in the cache is the entry before it plus a hash
of token, position and adapter; the next token is a hash of the sum of all entries, each times the weight of its
position.  So a page that is stale, foreign or lost changes every token after it.

What it decides, of each run:

- every request that was taken ends exactly once, or its client has left, and nothing follows its end;
- its tokens are those of the model, all of them if it ends by itself, and a beginning if something ended it;
- what ended it early is among the faults of the run;
- free, cached, private and deferred pages make up each pool whenever they are counted, and no page is held at the end;
- whatever else an owner counts as held, such as lent pages and bytes on their way, is given back at the end.
"""

import json
import sys
from collections.abc import Iterable, Iterator
from typing import Any

MASK = (1 << 64) - 1
SPREAD = 0xD6E8FEB86659FD93
# Why a request may end early -> the faults that may be behind it.
CAUSES = {
    "nonfinite_logits": {"NaN"},
    "executors_lost": {"Break", "Lose"},
    "engine_died": {"Crash"},
    "request_timeout": {"Jump", "Deadline"},
    "shutting_down": {"DrainEngine"},
    "replica_lost": {"Kill", "Rack", "Cut", "Restart"},
    "router_lost": {"Router"},
    "stream_not_found": {"Late", "Unsynced", "FullAtEnd"},
}
WRONG_ASKED = {"context_length_exceeded", "invalid_value", "invalid_request"}


class Broken(Exception):
    """A promise that a run did not keep."""


def scramble(number: int) -> int:
    """Return SplitMix64's hash of a 64-bit number."""
    number = ((number ^ (number >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    number = ((number ^ (number >> 27)) * 0x94D049BB133111EB) & MASK
    return number ^ (number >> 31)


class ReferenceModel:
    """The tokens that follow a prompt.  vocab: number of tokens.  adapter: its number, 0 for none."""

    def __init__(self, prompt: list[int], vocab: int, adapter: int = 0) -> None:
        self._vocab = vocab
        self._salt = scramble(adapter << 50) if adapter else 0
        self._position = self._entry = self._sum = 0
        for token in prompt:
            self._add(token)

    def tokens(self) -> Iterator[int]:
        """Return one token after another."""
        while True:
            mixed = ((self._sum ^ (self._sum >> 32)) * SPREAD) & MASK
            token = (mixed >> 40) % self._vocab
            self._add(token)
            yield token

    def _add(self, token: int) -> None:
        position = self._position
        hashed = ((scramble(token + 1) ^ scramble((position + 1) << 20)) * SPREAD) & MASK
        self._entry = (self._entry + hashed + self._salt) & MASK
        self._sum = (self._sum + self._entry * (scramble((position + 1) << 40) | 1)) & MASK
        self._position = position + 1


def expected(asked: dict[str, Any], head: dict[str, Any]) -> list[int]:
    """Return the tokens that a request gets if nothing disturbs it."""
    most, special = asked["most"], set(head["special"])
    stop_ids = set(asked["stop_ids"]) | (set() if asked["ignore_eos"] else special)
    found: list[int] = []
    shown: list[int] = []
    for token in ReferenceModel(asked["prompt"], head["vocab"], asked["adapter"]).tokens():
        if len(found) >= most:
            break
        found.append(token)
        stops = token in stop_ids
        if token not in special and (not stops or asked["include_stop"]):
            shown.append(token)
            if any(shown[-len(stop) :] == stop for stop in asked["stops"]):
                break
        if stops:
            break
    return found


class Checker:
    """The reader of one log.  Raises Broken at the first promise that was not kept."""

    def __init__(self) -> None:
        self.num_asked = self.num_ended = self.num_tokens = self.num_pages_counted = 0
        self._head: dict[str, Any] = {}
        self._asked: dict[int, dict[str, Any]] = {}
        self._right: dict[int, list[int]] = {}
        self._got: dict[int, int] = {}
        self._ended: set[int] = set()
        self._left: set[int] = set()
        self._faults: set[str] = set()
        self._wrong_at: dict[int, int] = {}
        self._pages: dict[str, tuple[int, int]] = {}
        self._held: dict[str, list[int]] = {}
        self._is_over = self._is_dead = False

    def read(self, lines: Iterable[str]) -> None:
        """Read a log to its end."""
        for line in lines:
            event = json.loads(line)
            getattr(self, f"on_{event['event']}", self.on_other)(event)
        self.finish()

    def on_other(self, event: dict[str, Any]) -> None:
        """Read nothing of an event that no rule needs."""

    def on_run(self, event: dict[str, Any]) -> None:
        """Keep the sizes of the run."""
        self._head = event

    def on_asked(self, event: dict[str, Any]) -> None:
        """Keep a request that was taken."""
        number = event["request"]
        if number in self._asked:
            raise Broken(f"request {number} is taken twice")
        self._asked[number] = event
        self._got[number] = 0
        self.num_asked += 1

    def on_fault(self, event: dict[str, Any]) -> None:
        """Keep a fault: what it may have ended."""
        self._faults.add(event["kind"])
        if event["kind"] in ("NaN", "Break"):
            self._wrong_at[event["request"]] = event["token"]

    def on_left(self, event: dict[str, Any]) -> None:
        """Keep that a client has gone, after which it gets no end."""
        if event["request"] not in self._ended:
            self._left.add(event["request"])

    def on_tokens(self, event: dict[str, Any]) -> None:
        """Compare tokens with the model's own."""
        number, tokens = event["request"], event["tokens"]
        if number not in self._asked:
            raise Broken(f"request {number} gets tokens and was never taken")
        if number in self._ended:
            raise Broken(f"request {number} goes on after its end")
        if number not in self._right:
            self._right[number] = self._expected(number)
        right, at = self._right[number], self._got[number]
        if right[at : at + len(tokens)] != tokens:
            raise Broken(f"request {number}: tokens {tokens[:4]} at {at}, the model has {right[at : at + 4]}")
        self._got[number] = at + len(tokens)
        self.num_tokens += len(tokens)

    def on_end(self, event: dict[str, Any]) -> None:
        """Check that a request ends once, and for a reason."""
        number, why = event["request"], event["why"]
        if number in self._ended:
            raise Broken(f"request {number} ends twice")
        if number not in self._asked:
            raise Broken(f"request {number} ends and was never taken")
        self._ended.add(number)
        self.num_ended += 1
        if why in ("stop", "length"):
            right = self._right.get(number) or self._expected(number)
            if self._got[number] != len(right):
                raise Broken(f"request {number} ends by {why} after {self._got[number]} of {len(right)} tokens")
            if self._wrong_at.get(number, len(right)) < len(right):
                raise Broken(f"request {number} ends whole, and its token {self._wrong_at[number]} had failed")
        elif why not in WRONG_ASKED and not CAUSES.get(why, set()) & self._faults:
            raise Broken(f"request {number} ends by {why!r}, and no fault of the run explains it")

    def on_pages(self, event: dict[str, Any]) -> None:
        """Check that each page of a pool has one owner."""
        counts, total = event["counts"], event["total"]
        if sum(counts) != total or min(counts) < 0:
            raise Broken(f"pages free, cached, private and deferred are {counts}, the pool has {total}")
        self._pages[event.get("pool", "")] = counts[2], counts[3]
        self.num_pages_counted += 1

    def on_held(self, event: dict[str, Any]) -> None:
        """Keep what an owner holds beside pages."""
        self._held[event["owner"]] = event["counts"]

    def on_over(self, event: dict[str, Any]) -> None:
        """Keep that the run came to rest."""
        self._is_over = True
        self._is_dead = event.get("died", False)

    def finish(self) -> None:
        """Check what must hold at the end."""
        if not self._is_over:
            raise Broken("the run did not come to rest")
        missing = sorted(set(self._asked) - self._ended - self._left)
        if missing:
            raise Broken(f"requests {missing[:8]} have no end")
        private = {pool: counts for pool, counts in self._pages.items() if any(counts)}
        if private and not self._is_dead:
            raise Broken(f"at rest, pages private to a row and deferred are {private}")
        held = {owner: counts for owner, counts in self._held.items() if any(counts)}
        if held:
            raise Broken(f"at rest, these hold something: {held}")

    def _expected(self, number: int) -> list[int]:
        asked, longest = self._asked[number], self._head["longest"]
        can_run = (
            asked["prompt"] and len(asked["prompt"]) < longest and len(asked["prompt"]) + asked["least"] <= longest
        )
        return expected(asked, self._head) if can_run else []


def check(lines: Iterable[str]) -> tuple[str, Checker]:
    """Return why a log is refused, '' if every promise was kept, and the counts of what was checked."""
    checker = Checker()
    try:
        checker.read(lines)
    except Broken as broken:
        return str(broken), checker
    return "", checker


def main(arguments: list[str]) -> int:
    """Check the runs of a file."""
    status, run = 0, list[str]()
    with open(arguments[0]) as file:
        runs = file.read().split("\n\n")
    for run in (text.splitlines() for text in runs if text.strip()):
        why, checker = check(run)
        head = json.loads(run[0])
        print(f"{head.get('world', '')} {head.get('seed', '')}: {why or 'kept'}, {checker.num_ended} requests ended")
        status |= bool(why)
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
