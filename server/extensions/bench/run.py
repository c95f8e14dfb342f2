"""A load against a server: each conversation at its time, or as soon as one of so many places is free.

Owns: when what is sent, the progress bar.  Does not know: events, statistics.
"""

import asyncio
import time
from collections.abc import Iterable
from dataclasses import replace

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from server.extensions.bench.client import Client, Record, Target
from server.extensions.bench.loads import Conversation, due


async def run(target: Target, load: list[Conversation], concurrency: int) -> tuple[str, list[Record], float]:
    """Returns the model's name, a record for each turn that was sent, and the seconds that it all took.

    concurrency: conversations at once, in a closed loop; 0 to send each when it is due, however many are open."""
    async with Client(target) as client:
        served = await client.first_model()
        if not target.model:
            client.target = target = replace(target, model=served)
        return target.model, *await _Run(client, load).go(concurrency)


class _Run:
    def __init__(self, client: Client, load: list[Conversation]) -> None:
        self._client = client
        self._load = load
        self._records: list[Record] = []
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self._progress = Progress(*columns, console=Console(stderr=True), transient=True)

    async def go(self, concurrency: int) -> tuple[list[Record], float]:
        with self._progress:
            self._task = self._progress.add_task("requests", total=sum(len(one.turns) for one in self._load))
            self._began = time.perf_counter()
            async with asyncio.TaskGroup() as group:
                if concurrency:
                    waiting = iter(due(self._load, [0.0] * len(self._load)))  # which all take from
                    for _ in range(min(concurrency, len(self._load))):
                        group.create_task(self._hold(waiting))
                else:
                    for one in self._load:
                        await asyncio.sleep(max(0.0, one.due_s - self._now()))
                        group.create_task(self._hold((one,)))
            return self._records, self._now()

    def _now(self) -> float:
        return time.perf_counter() - self._began

    async def _hold(self, conversations: Iterable[Conversation]) -> None:
        """One after another, turn by turn; a turn that fails ends its conversation, and what is left of it fails."""
        for conversation in conversations:
            said: list[dict[str, str]] = []
            due_s = conversation.due_s or self._now()
            for number, turn in enumerate(conversation.turns):
                record = Record(due_s=due_s, late_s=max(0.0, self._now() - due_s))
                answer = await self._client.ask(said, turn, record)
                self._records.append(record)
                self._progress.advance(self._task)
                if record.error:
                    left = len(conversation.turns) - number - 1
                    self._records += [Record(due_s=self._now(), error="an earlier turn failed") for _ in range(left)]
                    self._progress.advance(self._task, left)
                    break
                said += [{"role": "user", "content": turn.text}, {"role": "assistant", "content": answer}]
                due_s = self._now()
