"""A self-test of this machine's GPUs: kernels, attention, graphs, collectives, each compared with the right result.

Owns: the checks, their limits of time.  Does not know: how findings are shown.
Each check runs in a process of its own: a GPU that a kernel has broken stays broken for the process.

    python -m engine.startup.gpu_checks NAME DEVICE [RANK SIZE RENDEZVOUS]      the command that ``self_test`` runs
"""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass

import msgspec
import torch

from engine.graphs.device import device_for_graphs
from engine.host.interpreters import import_path, module_command
from engine.kernels.choice import choose_kernels
from engine.layers.attention import AttentionSpec
from engine.layers.comm import Comm
from engine.layers.norm import RMSNorm
from engine.plugins.hookspecs import CommContext
from engine.plugins.kinds import ATTENTION
from engine.plugins.manager import Plugins
from engine.plugins.proof.comm import check_rank
from engine.startup.race import AttentionRace
from engine.types.errors import PluginError

MODULE = "engine.startup.gpu_checks"
LIMIT_S = 120.0  # for all checks
COMPILE_S, RACE_S = 60.0, 30.0  # for the check of attention
TOLERANCE = 2e-2  # a few roundings of bfloat16
COMMS = {"cuda": ("torch", "pynccl", "symmetric"), "cpu": ("torch",)}


class CheckResult(msgspec.Struct, frozen=True):
    """The result of a check.  right: whether it passed.  found: what was observed."""

    name: str
    right: bool
    found: str


@dataclass(frozen=True, slots=True)
class CheckPlace:
    """The device of a check.  rank, size, rendezvous: for a process that is one of several; else a group of one."""

    device: torch.device
    rank: int = 0
    size: int = 1
    rendezvous: str = ""


def check_kernels(place: CheckPlace) -> str:
    """Compare fused kernels with the same computation in torch, on random numbers."""
    kernels = choose_kernels(place.device)
    if kernels is None:
        return "torch alone, as triton cannot be used; the log has the reason"
    x_TD, update_TD = torch.randn((2, 64, 1024), device=place.device).bfloat16()
    norm = RMSNorm(1024, 1e-6, place.device, torch.bfloat16)
    norm.weight.fill_(1)
    plain_x_TD = x_TD.clone()
    error = _error(norm.added(x_TD, update_TD, kernels), norm.added(plain_x_TD, update_TD, None))
    gates_TI, through_TI = update_TD.chunk(2, -1)
    gated = torch.nn.functional.silu(gates_TI.float()) * through_TI.float()
    error = max(error, _error(kernels.gated(update_TD), gated))
    assert error <= TOLERANCE, f"triton's results are off by {error:.3g}"
    return f"triton, within {error:.2g} of torch"


def check_attention(place: CheckPlace) -> str:
    """Measure every backend that can run on the heads of a usual model."""
    dtype = torch.bfloat16 if place.device.type == "cuda" else torch.float32
    spec = AttentionSpec(4, 16, 8, 128, 128**-0.5)
    plugins = Plugins({ATTENTION: "auto"})
    report = AttentionRace(plugins, spec, 16, place.device, dtype, limit_s=RACE_S, compile_s=COMPILE_S).run()
    fastest = report.fastest()
    told = [f"{phase}: {one}" for phase, one in fastest.items()]
    told += [
        f"{one.contender} is out in {phase}: {one.problem}"
        for phase, results in report.results.items()
        for one in results
        if one.problem
    ]
    assert set(fastest) == set(report.results), "; ".join(told)
    return "fastest in " + "; ".join(told)


def check_graphs(place: CheckPlace) -> str:
    """Capture work once and replay it on other numbers."""
    graphs = device_for_graphs(place.device)
    if not graphs.captures:
        return "a CPU has none"
    weight_DD = torch.randn((256, 256), device=place.device) / 16
    x_TD, y_TD = (graphs.buffer((8, 256), torch.float32) for _ in range(2))
    pool = graphs.pool()
    with graphs.stream():
        y_TD.copy_(x_TD @ weight_DD)
        graphs.begin_capture(pool, 8)
        y_TD.copy_((x_TD @ weight_DD).add_(1))
        graph = graphs.end()
    worst = 0.0
    for _ in range(3):
        x_TD.normal_()
        graph.replay()
        worst = max(worst, _error(y_TD, x_TD.double() @ weight_DD.double() + 1))
    assert worst <= TOLERANCE, f"a replay is off by {worst:.3g}"
    return f"captured and replayed, within {worst:.2g}"


def check_collectives(place: CheckPlace) -> str:
    """Check every communication library that can run here, on all GPUs of this machine."""
    if place.rendezvous:
        return _check_rank(place)
    size = torch.cuda.device_count() if place.device.type == "cuda" else 2
    with tempfile.TemporaryDirectory() as directory:
        ranks = [
            subprocess.Popen(
                module_command(
                    MODULE, "collectives", place.device.type, f"{rank}", f"{size}", f"file://{directory}/ranks"
                ),
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, **import_path()},
            )
            for rank in range(size)
        ]
        try:
            results = [_read("collectives", rank.communicate()[0], rank.returncode) for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
    wrong = [f"rank {rank}: {one.found}" for rank, one in enumerate(results) if not one.right]
    assert not wrong, "; ".join(wrong)
    return f"{size} ranks: {results[0].found}"


def _check_rank(place: CheckPlace) -> str:
    if place.device.type == "cuda":
        torch.cuda.set_device(place.rank)
    told = []
    for name in COMMS[place.device.type]:
        url = f"{place.rendezvous}.{name}"
        context = CommContext(place.rank, place.size, place.device.type, url)
        try:
            plugins = Plugins({"comm": name})
            comm = plugins.build(f"comm.{name}", context, Comm)
        except PluginError as error:
            told.append(f"{name} cannot run ({error})")
            continue
        check_rank(comm, place.device.type)
        if place.device.type == "cuda":
            check_captured(comm, place.device)
        told.append(f"{name} is right")
    assert any(one.endswith("is right") for one in told), "; ".join(told)
    return "; ".join(told)


def check_captured(comm: Comm, device: torch.device, num_elements: int = 8 * 4096) -> float:
    """Replay collectives in a graph.  Return the largest error; raises AssertionError if there is one."""
    ours, summed = torch.ones(num_elements, device=device), torch.zeros(num_elements, device=device)
    comm.all_reduce(summed)  # the first call connects the ranks, which a capture cannot do
    comm.all_gather(summed)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        ours.add_(1)
        summed.copy_(ours)
        gathered = comm.all_gather(comm.all_reduce(summed))
    ours.fill_(4)
    for expected in (5, 6):
        graph.replay()
        torch.cuda.synchronize()
        error = (gathered - expected * comm.size).abs().max().item()
        assert error == 0, f"a sum in a graph is off by {error:.3g}"
    graph.reset()
    comm.close()
    return error


CHECKS: Mapping[str, Callable[[CheckPlace], str]] = {
    "kernels": check_kernels,
    "graphs": check_graphs,
    "collectives": check_collectives,
    "attention": check_attention,
}


def self_test(device: str, limit_s: float = LIMIT_S) -> Iterator[CheckResult]:
    """Yield the result of every check as it ends, on a 'cuda' or 'cpu' device.

    A check that hangs, dies or comes too late has failed, and the others still run."""
    ends_at = time.monotonic() + limit_s
    for name in CHECKS:
        left_s = max(1.0, ends_at - time.monotonic())
        # In a session of its own, so that ranks that it has started end with it.
        process = subprocess.Popen(
            module_command(MODULE, name, device),
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **import_path()},
            start_new_session=True,
        )
        try:
            said, _ = process.communicate(timeout=left_s)
        except subprocess.TimeoutExpired:
            yield CheckResult(name, False, f"not done within the {limit_s:g} s for all checks")
        else:
            yield _read(name, said, process.returncode)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


def _read(name: str, said: str, code: int) -> CheckResult:
    try:
        return msgspec.json.decode(said.strip().rpartition("\n")[2], type=CheckResult)
    except msgspec.DecodeError:
        return CheckResult(name, False, f"its process ended with exit code {code} and no result")


def _error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest error, relative to expected numbers above 1."""
    difference = (found.double() - expected.double()).abs()
    return float((difference / expected.double().abs().clamp_(min=1)).max())


def main(name: str, device: str, rank: str = "0", size: str = "1", rendezvous: str = "") -> None:
    """Run one check and print its result as a line of JSON."""
    try:
        with torch.inference_mode():
            result = CheckResult(
                name, True, CHECKS[name](CheckPlace(torch.device(device), int(rank), int(size), rendezvous))
            )
    except Exception as error:  # any error is the result of the check
        result = CheckResult(name, False, " ".join(f"{type(error).__name__}: {error}".split())[:500])
    print(msgspec.json.encode(result).decode(), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
