"""The communicators for GPUs in a group of one: every collective, and what is captured and replayed in a graph."""

import tempfile
from collections.abc import Callable, Iterator
from functools import partial

import torch

from engine.layers.comm import Comm
from engine.plugins.comm import pynccl as nccl
from engine.plugins.comm import symmetric
from engine.plugins.comm import torch as torch_comm
from engine.plugins.comm.pynccl.library import NcclLibrary, find_library
from engine.plugins.comm.symmetric.memory import has_summing_switch
from engine.plugins.hookspecs import CommContext
from engine.plugins.proof.comm import check_rank
from engine.startup.gpu_checks import check_captured
from gpu_sections.rows import Row, seconds_of, skipped

NUM_ELEMENTS = 8 * 4096  # the hidden states of a small decode batch


def section(device: torch.device) -> Iterator[Row]:
    """A row per communicator and question."""
    if device.type != "cuda":
        yield skipped("NCCL is for NVIDIA GPUs")
        return
    yield {"case": f"NCCL {NcclLibrary(find_library()).version()}, torch's {_torch_version()}", "ok": True}
    yield {"case": f"a switch that sums: {'perhaps' if has_summing_switch() else 'no'}", "ok": True}
    with tempfile.TemporaryDirectory() as directory:
        for name, plugin in (("torch", torch_comm), ("pynccl", nccl), ("symmetric", symmetric)):
            for number, (case, check) in enumerate(CHECKS.items()):
                context = CommContext(0, 1, device.type, f"file://{directory}/{name}{number}")
                yield {"case": f"{name}: {case}", **_tried(check, partial(plugin.callboard_comm, context), device)}


def _tried(check: Callable[[Comm, torch.device], Row], connect: Callable[[], Comm], device: torch.device) -> Row:
    """Return the check's result; a failure is one, and the next check is made."""
    try:
        return check(connect(), device)
    except Exception as error:
        return {"ok": False, "problem": f"{type(error).__name__}: {error}"[:300]}


def _torch_version() -> str:
    return ".".join(map(str, torch.cuda.nccl.version()))


def _contract(comm: Comm, device: torch.device) -> Row:
    check_rank(comm, str(device))
    return {"ok": True}


def _captured(comm: Comm, device: torch.device) -> Row:
    return {"ok": True, "error": check_captured(comm, device, NUM_ELEMENTS)}


def _timed(comm: Comm, device: torch.device) -> Row:
    tensor = torch.ones(NUM_ELEMENTS, dtype=torch.bfloat16, device=device)
    seconds = seconds_of(lambda: comm.all_reduce(tensor), device)
    comm.close()
    return {"ok": True, "us": seconds * 1e6}


CHECKS: dict[str, Callable[[Comm, torch.device], Row]] = {
    "the conformance kit": _contract,
    "collectives in a graph": _captured,
    "one all_reduce of 64 KB": _timed,
}
