"""The simulated device says no to what a real one would compute something wrong from."""

import msgspec
import numpy as np
import pytest

from engine.features.host_tier.messages import Transfers
from engine.messages import Admission, Step
from engine.types.params import SamplingParams
from server.extensions.chaos.sim.device import SimDevice, SimIncorrect
from server.extensions.chaos.sim.store import SimStore


def int32(*numbers: int) -> bytes:
    return np.array(numbers, dtype=np.int32).tobytes()


def prefill(num_computed: int, num_tokens: int) -> Step:
    """Of six tokens in pages 0 and 1, of four each."""
    admission = Admission(
        row=0,
        token_ids=int32(1, 2, 3, 4, 5, 6),
        num_prompt_tokens=6,
        num_computed_tokens=num_computed,
        pages=int32(0, 1),
        params=SamplingParams(),
    )
    return Step(
        step_id=0,
        admissions=(admission,),
        prefill_rows=int32(0),
        prefill_starts=int32(num_computed),
        prefill_lengths=int32(num_tokens),
        prefill_samples=int32(0),
    )


@pytest.mark.parametrize(("num_computed", "is_right"), [(4, True), (2, False)])
def test_a_page_that_comes_back_from_the_host_is_not_written_in_the_same_step(
    num_computed: int, is_right: bool
) -> None:
    """Its layers come back one after the other, beside the step."""
    sizes = {"num_rows": 1, "max_len": 8, "page_size": 4, "num_pages": 2, "num_host_pages": 1, "num_slots": 0}
    device = SimDevice(
        **sizes, store=SimStore(0, 0.0), nan_tokens={}, breaks={}, draft=lambda *_: [], mark=lambda what: None
    )
    device.run(prefill(0, 6))
    page = {"device_pages": int32(0), "host_pages": int32(0)}
    device.run(msgspec.structs.replace(prefill(0, 6), parts=Transfers(to_host=int32(1), **page).part()))
    back = msgspec.structs.replace(
        prefill(num_computed, 6 - num_computed), parts=Transfers(to_host=int32(0), **page).part()
    )
    if is_right:
        device.run(back)
        return
    with pytest.raises(SimIncorrect, match="a page that comes back from the host with it"):
        device.run(back)
