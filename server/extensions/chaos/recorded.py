"""A recording of a server, replayed with faults that it did not have.

Owns: which faults a seed adds.  Does not know: how messages are played, what must hold (``engine/features/recording``).
"""

import random
from pathlib import Path

from engine.features.recording.file import read_recording
from engine.features.recording.shrinking import Op, play_ops, story_of
from engine.messages import Abort, Admit, StepDone
from engine.types.notices import ExecutorsLost, ExecutorsReady
from server.extensions.chaos.sim.luck import luck


def disturbed(path: Path, seed: int) -> tuple[str, str]:
    """Replay a recording with the faults of a seed.  Return the broken invariant, '' for none, and what was added.

    Seed 0 adds nothing.  Others abort requests, and lose all executors in the middle of steps: about two of each in a
    short recording, and in a long one more."""
    recording = read_recording(path)
    story = story_of(recording)
    rng = random.Random(seed)
    num_aborts = num_losses = 0
    ops: list[Op] = []
    open_ids: list[int] = []
    num_pages = next((op.message.num_pages for op in story.ops if isinstance(op.message, ExecutorsReady)), 0)
    num_steps = sum(isinstance(op.message, StepDone) for op in story.ops)
    abort_share, loss_share = max(0.02, 2 / max(1, len(story.ops))), max(0.005, 2 / max(1, num_steps))
    for number, op in enumerate(story.ops):
        ops.append(op)
        if isinstance(op.message, Admit):
            open_ids.append(op.message.request_id)
        chance = luck(seed, number)
        if seed and open_ids and chance < abort_share:
            ops.append(Op(Abort(request_id=open_ids.pop(rng.randrange(len(open_ids)))), op.at, True))
            num_aborts += 1
        elif seed and num_pages and isinstance(op.message, StepDone) and chance > 1 - loss_share:
            ops.append(Op(ExecutorsLost(reason="planted"), op.at, True))
            ops.append(Op(ExecutorsReady(num_pages=num_pages), op.at, True))
            num_losses += 1
    fault, turns = play_ops(recording, story, ops)
    return fault, f"{len(turns)} turns, {num_aborts} aborts and {num_losses} losses of executors added"
