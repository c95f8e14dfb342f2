"""Norms that sum over ranks, with a double of the launch that does both: which sums it takes, and the same logits."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from engine.graphs.comm import BreakingComm
from engine.layers.kernels import DeviceKernels
from engine.layers.summed_norm import SummedNorm, leave_sums
from engine.plugins.families import read_model
from engine.plugins.testing.steps import Driver
from engine.plugins.testing.threads import ThreadComm, on_ranks
from tests.graphs.driver import KeepingRecorder
from tests.graphs.recording import RecordingDevice
from tests.models.checkpoints import build, random_tokens, save
from tests.models.conftest import load


class Kernels:
    """As much of a GPU's kernels as a dense decoder calls, in torch."""

    on_cpu = False
    recurrences = None
    widest_rounded = 0

    def choose_experts(self, *given):
        raise NotImplementedError

    mix_experts = add_norm_round = gated_round = choose_experts

    def add_norm(self, x_TD: Tensor, update_TD: Tensor | None, weight_D: Tensor, eps: float) -> Tensor:
        return F.rms_norm(x_TD if update_TD is None else x_TD.add_(update_TD), weight_D.shape, weight_D, eps)

    def angle_table(self, positions_T: Tensor, frequencies_R: Tensor, scale: float) -> Tensor:
        angles = positions_T[:, None] * frequencies_R
        return torch.cat((angles.cos(), angles.sin()), -1) * scale

    def rotate_and_store(self, qkv, weight, eps, angles, keys, values, slots, limit=0.0):
        groups = keys.shape[1]
        heads = qkv[:, :-groups]
        heads = heads if weight is None else F.rms_norm(heads, heads.shape[-1:], None, eps) * weight
        (x, y), (cos, sin) = heads.chunk(2, -1), angles[:, None].chunk(2, -1)
        turned = torch.cat((x * cos - y * sin, y * cos + x * sin), -1)
        keys[slots], values[slots] = turned[:, -groups:], qkv[:, -groups:]
        return turned[:, :-groups]

    def gated(self, gate_up: Tensor, kind: str = "silu") -> Tensor:
        gate, up = gate_up.chunk(2, -1)
        return F.silu(gate) * up

    def embed_shard(self, token_ids: Tensor, table: Tensor, first: int) -> Tensor:
        local = token_ids - first
        here = (local >= 0) & (local < len(table))
        return table[local.where(here, 0)] * here[:, None]


class NormingThreads:
    """A rank of threads that also normalises.  sums, norms_done: number of calls.  most: rows that it normalises."""

    norms = capturable = True

    def __init__(self, comm: ThreadComm, most: int = 100) -> None:
        self.rank, self.size = comm.rank, comm.size
        self.most = most
        self.sums = self.norms_done = 0
        self.all_gather, self.close = comm.all_gather, comm.close
        self._comm = comm

    def all_reduce(self, tensor: Tensor) -> Tensor:
        self.sums += 1
        return self._comm.all_reduce(tensor)

    def add_norm(self, x_TD: Tensor, part_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor | None:
        if len(x_TD) > self.most:
            return None
        self.norms_done += 1
        return Kernels().add_norm(x_TD, self._comm.all_reduce(part_TD), weight_D, eps)


STEPS = ({"a": 4}, {"a": 1, "b": 5}, {"a": 1, "b": 1})


def logits_of(model) -> Tensor:
    driver, found = Driver(model, page_size=4), []
    tokens = {"a": random_tokens(6, 1), "b": random_tokens(6, 2)}
    for counts in STEPS:
        batch = {}
        for name, count in counts.items():
            batch[name], tokens[name] = tokens[name][:count], tokens[name][count:]
        found += driver.step(batch).values()
    return torch.cat(found)


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory):
    return read_model(save(build("qwen3-tied"), tmp_path_factory.mktemp("model")))


@pytest.mark.parametrize("most", [100, 4, 0])
def test_each_layers_sums_but_the_last_are_in_the_launch_of_a_norm(spec, most: int):
    expected = logits_of(load(spec))
    kernels = Kernels()
    assert isinstance(kernels, DeviceKernels)

    def one_rank(threads: ThreadComm) -> tuple[Tensor, int, int, int]:
        comm = NormingThreads(threads, most)
        model = load(spec, comm=BreakingComm(comm, KeepingRecorder(RecordingDevice(), object())))
        model.kernels = kernels
        leave_sums(model.layers, kernels)
        return logits_of(model), comm.sums, comm.norms_done, len(model.layers)

    for found, sums, norms_done, num_layers in on_ranks(2, one_rank):
        assert (found - expected).abs().max() < 1e-4
        # Of a step: the embedding's sum, and two for each layer, of which the last one's MLP sums by itself.
        joined = sum(sum(counts.values()) <= most for counts in STEPS) * (2 * num_layers - 1)
        assert norms_done == joined
        assert sums == len(STEPS) * (1 + 2 * num_layers) - joined


def test_without_a_device_or_a_group_that_can_nothing_changes(spec):
    for kernels, norms in ((None, True), (Kernels(), False)):

        def one_rank(threads: ThreadComm, kernels=kernels, norms=norms) -> list[type]:
            comm = NormingThreads(threads)
            comm.norms = norms
            model = load(spec, comm=comm)
            leave_sums(model.layers, kernels)
            return [type(norm) for layer in model.layers for norm in (layer.before_attention, layer.before_mlp)]

        assert all(SummedNorm not in norms for norms in on_ranks(2, one_rank))
    model = load(spec)
    leave_sums(model.layers, Kernels())
    assert not any(isinstance(layer.before_mlp, SummedNorm) for layer in model.layers)


class Ones:
    """Inserts that add one to what every layer gives."""

    def embed(self, x_TD: Tensor) -> Tensor:
        return x_TD

    def behind(self, layer: int, update_TD: Tensor) -> Tensor:
        return update_TD + 1


def test_what_is_added_behind_a_layer_is_added_once(spec, monkeypatch: pytest.MonkeyPatch):
    tensors = Driver._tensors

    def with_ones(self, *given):
        step = tensors(self, *given)
        step.inserts = Ones()
        return step

    monkeypatch.setattr(Driver, "_tensors", with_ones)
    expected = logits_of(load(spec))

    def one_rank(threads: ThreadComm) -> Tensor:
        model = load(spec, comm=NormingThreads(threads))
        model.kernels = Kernels()
        leave_sums(model.layers, model.kernels)
        return logits_of(model)

    for found in on_ranks(2, one_rank):
        assert (found - expected).abs().max() < 1e-4
