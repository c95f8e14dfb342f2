"""The process of one executor: ``python -m engine.workers.executor_main``, which only the engine starts.

Owns: its life, from the ticket to its exit code.  Does not know: other ranks, restarts.
It ends when the engine stops it, when it fails, and when its parent dies.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path

from msgspec import structs

from engine.actors.executor import Executor
from engine.actors.runner import Runner
from engine.actors.step_splitting import StepSplitter
from engine.host.waiting import wait_briefly
from engine.workers.child import Ticket, enter
from engine.workers.main import Outgoing, WorkerProcess
from engine.workers.messages import ExecutorAssignment, ExecutorProcessInbox, Place, WorkerReady

Load = Callable[[ExecutorAssignment], Runner]
CAPACITY = 64  # messages of the link; with two steps in flight a handful are in transit


def main(load: Load) -> None:
    """Serve, then exit with the process's exit code."""
    wait_briefly()  # on another machine the engine's own call does not count
    enter(lambda ticket: ExecutorProcess(ticket, load).run())


class ExecutorProcess(WorkerProcess[ExecutorAssignment]):
    """An executor actor, with a link in place of the scheduler."""

    def __init__(self, ticket: Ticket, load: Load) -> None:
        super().__init__(ticket, assignment=ExecutorAssignment, accepts=ExecutorProcessInbox, capacity=CAPACITY)
        self._rank = ticket.rank
        self._place = ticket.place
        self._load = load

    async def build(self, assignment: ExecutorAssignment, outgoing: Outgoing) -> Executor:
        """Return the executor, which loads on its own thread once it runs."""
        if self._place is not None:
            assignment = settle(assignment, self._place)
        executor = Executor(rank=self._rank, capacity=assignment.capacity, load=partial(self._load, assignment))
        executor.connect(ready=lambda num_pages: outgoing.put(WorkerReady(num_pages=num_pages)), done=outgoing.put)
        return executor


def settle(assignment: ExecutorAssignment, place: Place) -> ExecutorAssignment:
    """Return ``assignment`` with the paths and the GPU of this machine."""
    model = assignment.config.model
    if place.path:
        model = structs.replace(model, path=place.path, tokenizer=place.tokenizer)
    config = structs.replace(assignment.config, model=model)
    return structs.replace(assignment, config=config, local_rank=place.local_rank)


def load_rank(assignment: ExecutorAssignment) -> Runner:
    """Return the runner of one rank; called on the device thread.  Raises what loading raises."""
    from engine.checkpoints.fingerprint import check_fingerprint
    from engine.plugins.families import read_model
    from engine.plugins.kinds import OBSERVER, chosen_plugins
    from engine.plugins.manager import Plugins
    from engine.plugins.weight_type import with_weight_type
    from engine.startup.loading import load_runner  # imports torch

    config = assignment.config
    config, spec = with_weight_type(config, read_model(Path(config.model.path), config.plugins, config.model))
    if assignment.fingerprint:
        check_fingerprint(assignment.fingerprint, spec, config.model.load_format, assignment.rank)
    chosen = {kind: names for kind, names in chosen_plugins(config).items() if kind != OBSERVER}
    plugins = Plugins(chosen, config.plugins.options)
    runner = load_runner(
        config,
        spec,
        assignment.max_len,
        plugins,
        rank=assignment.rank,
        local_rank=assignment.local_rank,
        rendezvous=assignment.rendezvous,
        progress=assignment.progress,
        num_pages=assignment.num_pages,
        given=assignment.given,
    )
    return StepSplitter(runner, alone=assignment.num_ranks == 1, most_tokens=assignment.most_tokens)


if __name__ == "__main__":
    main(load_rank)
