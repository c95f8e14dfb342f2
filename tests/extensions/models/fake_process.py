"""A model's process without an engine.  The path of its model says what it does: die, fail, stay or serve."""

import time

from engine.actors.actor import Actor
from engine.messages import Stop
from engine.types.errors import WeightsError
from engine.workers.child import end, enter
from engine.workers.main import Outgoing
from engine.workers.messages import WorkerReady
from server.extensions.models.model_process import ModelAssignment, ModelLoaded, ModelProcess
from server.model_card import ModelCard


class Staying(Actor[Stop]):
    """An actor that does not leave."""

    def close(self) -> None:
        time.sleep(600)


class FakeProcess(ModelProcess):
    async def build(self, assignment: ModelAssignment, outgoing: Outgoing) -> Actor[Stop]:
        path = assignment.config.model.path
        if path == "die":
            end(3)
        if path == "fail":
            raise WeightsError(f"{path}: no weights")
        outgoing.put(ModelLoaded(card=ModelCard(name=path, max_model_len=8, vocab_size=9, created=0)))
        outgoing.put(WorkerReady())
        return Staying("model", 1) if path == "stay" else Actor("model", 1)


if __name__ == "__main__":
    enter(lambda ticket: FakeProcess(ticket).run())
