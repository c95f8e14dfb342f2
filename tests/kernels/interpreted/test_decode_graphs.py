"""A captured decode step made of this project's kernels alone: inputs, attention, layers, sampling, write-back.

The interpreter has no graphs, so a replay runs the step's Python again, which finds everything where a graph would.
"""

from functools import partial

import pytest
import torch

from engine.execution.rows import DeviceRows
from engine.execution.runner import ModelRunner
from engine.graphs.capturing import Capturing
from engine.graphs.decode import DecodeGraphs
from engine.layers.kv_pool import KVPool
from engine.plugins.attention.triton.backend import TritonAttention
from engine.plugins.comm.local import LocalComm
from engine.plugins.linear.onednn import onednn_linears
from engine.sampling.sampler import Sampler
from engine.settings import own_kernels
from tests.graphs.recording import RecordingDevice
from tests.graphs.runners import GREEDY, MAX_LEN, PAGE_SIZE, Steps, tokens
from tests.models.checkpoints import build, save

CPU = torch.device("cpu")
WISHES = (
    GREEDY,
    GREEDY.replace(temperature=0.8, seed=3),
    GREEDY.replace(temperature=0.9, top_k=5, top_p=0.8, repetition_penalty=1.3, seed=4),
)


class Rerun:
    """A recording that is run again, not replayed; so attention must be told again what it was told at the capture."""

    def __init__(self, breaker, prepare, run):
        self._breaker, self._prepare, self._run = breaker, prepare, run

    def replay(self, branch):
        self._breaker.wanted = branch
        self._prepare()
        return self._run()


class RerunBreaker:
    num_tokens = 0
    graphs = None
    wanted = None  # all

    def record(self, size, run):
        run()
        return Rerun(self, partial(self.graphs._attention.prepare, size), run)

    def branch(self, name, work):
        if self.wanted in (None, name):
            work()


class NoGrammars:
    rows = ()

    def admit(self, *_):
        pass

    def begin(self, _):
        return None


def runner_of(model, captured):
    spec = model.attention_spec
    pool = KVPool(spec.num_layers, 40, PAGE_SIZE, spec.num_kv_heads, spec.head_size, model.dtype, CPU)
    attention, rows = TritonAttention(spec, pool), DeviceRows(3, MAX_LEN, PAGE_SIZE, CPU)
    sampler, graphs, device = Sampler(3, model.vocab_size, MAX_LEN, CPU), None, RecordingDevice()
    if captured:
        recorder = RerunBreaker()
        graphs = recorder.graphs = DecodeGraphs(
            model=model,
            pool=pool,
            attention=attention,
            rows=rows,
            sampler=sampler,
            device=device,
            recorder=recorder,
            capturing=Capturing(device, LocalComm(), CPU, rehearsal=False),
            sizes=(3,),
        )
        graphs.capture()
    return ModelRunner(
        comm=LocalComm(),
        graphs=device,
        model=model,
        pool=pool,
        attention=attention,
        piecewise=None,
        whole_decodes=graphs,
        rows=rows,
        constraints=NoGrammars(),
        sampler=sampler,
        eos_token_ids=(),
    )


@pytest.fixture
def model(tmp_path, monkeypatch):
    from engine.models.loader import load_model
    from engine.plugins.families import read_model

    monkeypatch.setenv(own_kernels.VARIABLE, "triton")
    path = save(build("qwen3"), tmp_path)
    model = load_model(
        read_model(path),
        LocalComm(),
        CPU,
        torch.float32,
        "safetensors",
        7,
        linears=onednn_linears(torch.float32),
        progress=False,
    )
    model.layers = model.layers[:2]  # the first, and one behind another; the third is as the second
    return model


def test_kernels_alone_decode_as_they_do_step_by_step(model):
    captured, plain = Steps(runner_of(model, True)), Steps(runner_of(model, False))
    assert captured.runner._whole_decodes._sampler._kernels is not None
    for one in (captured, plain):
        for row, params in enumerate(WISHES):
            one.prefill(row, 3 + row, params)
    for rows in ((0, 1, 2), (0, 1), (0, 1, 2), (2,)):
        assert tokens(captured.decode(*rows)) == tokens(plain.decode(*rows)), rows
