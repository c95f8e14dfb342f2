"""Planted bugs of the journal and its streams: each must be found by the simulation of streams that are rejoined.

Owns: the bugs.  Does not know: how they are found.
"""

from collections.abc import Callable
from typing import Any

import msgspec

from server.extensions.chaos.rejoin.disk import SimSegments
from server.extensions.chaos.sim.mutants import Method, instead_of, made_from
from server.extensions.journal.events import NumberedEvents
from server.extensions.journal.journal import Journal
from server.extensions.journal.records import Accepted, Record
from server.extensions.journal.run import Reader, Run
from server.extensions.journal.streams import Streams


@instead_of(Journal, "_sync")
async def clients_learn_what_is_not_synced_yet(
    sync: Method, self: Journal, told: list[tuple[Any, bytes, Callable[[], object]]]
) -> None:
    for _, _, then in told:
        then()
    await sync(self, [])


@made_from(SimSegments, "_open_found")
def what_an_earlier_process_wrote_is_not_synced(_: Method) -> Method:
    return lambda self: []


@instead_of(Journal, "_mend")
def what_came_while_the_disk_was_full_is_not_written_later(_: Method, self: Journal) -> None:
    self._timer, self._is_writable, self.is_failing = None, True, False


@instead_of(Journal, "_take")
def records_count_wherever_they_stand(take: Method, self: Journal, raw: bytes, record: Record, segment: int) -> None:
    known = self.entries.get(record.number)
    if known is not None and not isinstance(record, Accepted):
        record = msgspec.structs.replace(record, at=len(known.records))
    take(self, raw, record, segment)


@instead_of(Run, "_open")
async def a_stream_that_goes_on_begins_anew(open_choices: Method, self: Run) -> Any:
    self._told.clear()
    return await open_choices(self)


@instead_of(Streams, "_resume")
async def what_ran_is_not_started_again(_: Method, self: Streams, runs: list[Run]) -> None:
    pass


@instead_of(Streams, "_recover")
async def what_ran_is_not_read_again(_: Method, self: Streams) -> list[Run]:
    return []


@instead_of(NumberedEvents, "__init__")
def the_last_event_is_sent_again(
    begin: Method, self: NumberedEvents, request: Any, *, num_known: int, **more: Any
) -> None:
    begin(self, request, num_known=max(0, num_known - 1), **more)


@instead_of(NumberedEvents, "__init__")
def an_event_is_skipped_behind_the_last_one(
    begin: Method, self: NumberedEvents, request: Any, *, num_known: int, **more: Any
) -> None:
    begin(self, request, num_known=num_known + (num_known > 0), **more)


@instead_of(Reader, "__init__")
def a_reader_that_comes_back_misses_what_came_meanwhile(begin: Method, self: Reader, run: Run) -> None:
    begin(self, run)
    self.num_read = run.num_written


@instead_of(Streams, "__init__")
def a_stream_ends_soon_after_its_client_has_gone(
    begin: Method, self: Streams, *given: Any, rejoin_s: float, **more: Any
) -> None:
    begin(self, *given, rejoin_s=rejoin_s / 100, **more)


@made_from(Streams, "_expire")
def a_stream_is_kept_for_ever(_: Method) -> Method:
    return lambda self, run: None
