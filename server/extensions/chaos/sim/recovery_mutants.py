"""Planted bugs in what starts, watches, restarts and ends workers: each must be found by the simulation of recovery.

Owns: the bugs.  Does not know: how they are found.  See ``mutants.py``.
"""

import asyncio
from collections.abc import Callable
from typing import Any

from engine.workers.executors import _ExecutorGroup
from engine.workers.frontend import RemoteIngress
from engine.workers.group import Watch, WorkerGroup, WorkerRun, _Generation
from engine.workers.limits import RestartIntensity
from engine.workers.messages import Handover
from engine.workers.tokenizers import TokenizerPool
from engine.workers.worker import WorkerLost
from server.extensions.chaos.sim.mutants import Method, instead_of, made_from
from server.extensions.chaos.sim.recovery import SimWorker


@instead_of(_Generation, "close")
def a_lost_worker_is_still_heard(_: Method, self: _Generation[Any, Any]) -> None:
    for life in self.lives:
        life.takes_work = False


@instead_of(_Generation, "close")
def a_lost_worker_still_gets_work(_: Method, self: _Generation[Any, Any]) -> None:
    self.is_open = False


@made_from(Watch, "tick")
def a_hang_is_not_noticed(_: Callable[..., None]) -> Callable[..., None]:
    return lambda self, patience=1: None


@made_from(_Generation, "tick_loading")
def a_hang_while_loading_is_not_noticed(_: Callable[..., None]) -> Callable[..., None]:
    return lambda self: None


@made_from(Watch, "received")
def a_worker_that_speaks_counts_as_silent(_: Callable[..., None]) -> Callable[..., None]:
    return lambda self: None


@made_from(Watch, "tick")
def a_loading_worker_is_watched_like_any(tick: Callable[..., str | None]) -> Callable[..., str | None]:
    return lambda self, patience=1: tick(self)


@instead_of(_Generation, "lost")
def one_that_loads_too_long_is_waited_for(
    lost: Callable[..., None], self: _Generation[Any, Any], loss: WorkerLost
) -> None:
    if "did not load" not in str(loss):
        lost(self, loss)


@instead_of(_Generation, "received")
def the_first_that_loads_stands_for_all(
    heard: Callable[..., None], self: _Generation[Any, Any], life: WorkerRun[Any, Any], message: Any
) -> None:
    for one in self.lives:
        one.ready = one.ready or life.ready
    heard(self, life, message)


@instead_of(SimWorker, "kill")
async def the_next_starts_before_the_last_is_gone(_: Method, self: SimWorker, *, is_stuck: bool) -> None:
    self.world.killed(self)


@instead_of(WorkerGroup, "_live")
async def a_slot_is_filled_again_while_the_engine_ends(
    live: Callable[..., Any], self: WorkerGroup[Any, Any], slots: Any
) -> Any:
    generations = [slot.life for slot in slots]
    losses = await live(self, slots)
    lives = [slot.life for slot in slots if slot.life not in generations]
    return losses or [loss for life in lives for loss in life._generation.losses]


@instead_of(WorkerGroup, "_give_up")
def a_kill_is_cut_short(give_up: Callable[..., None], self: WorkerGroup[Any, Any]) -> None:
    give_up(self)
    for task in asyncio.all_tasks():
        if task.get_name().endswith(".keep"):
            task.cancel()


@instead_of(SimWorker, "end")
async def workers_are_killed_at_the_end(_: Method, self: Any) -> None:
    pass


@made_from(RestartIntensity, "allows")
def restarts_are_not_counted(_: Callable[..., bool]) -> Callable[..., bool]:
    return lambda self, now: True


@made_from(RestartIntensity, "allows")
def every_restart_counts_twice(allows: Callable[..., bool]) -> Callable[..., bool]:
    return lambda self, now: allows(self, now) and allows(self, now)


@instead_of(_ExecutorGroup, "on_lost")
def the_scheduler_hears_of_a_loss_too_late(_: Method, self: _ExecutorGroup, slots: Any, loss: Any) -> None:
    self._lost_at = 0.0


@made_from(TokenizerPool, "on_lost")
def requests_wait_for_a_tokenizer_that_is_gone(_: Callable[..., None]) -> Callable[..., None]:
    return lambda self, slots, loss: None


@made_from(RemoteIngress, "_abort_open")
def a_lost_fronts_requests_go_on(_: Callable[..., None]) -> Callable[..., None]:
    return lambda self: self._open.clear()


@instead_of(RemoteIngress, "_handover")
def the_next_front_counts_from_one(_: Method, self: RemoteIngress) -> Any:
    return Handover()
