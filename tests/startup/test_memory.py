"""Memory of a start: the pool gets what the largest step and the graphs leave, measured before it is allocated."""

import json
import logging
import math
import subprocess
import sys
import weakref
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
import torch

from callboard import LLM
from engine.config import Config, build_config
from engine.control.system import System
from engine.execution.attention import RankAttention
from engine.execution.needs import Needs
from engine.graphs.capturing import Capturing
from engine.graphs.decode import DecodeGraphs
from engine.graphs.device import DeviceMemory
from engine.host.device_defaults import with_device_defaults
from engine.layers.comm import Unconnected
from engine.models import loader
from engine.models.decoder import Decoder
from engine.plugins.comm.local import LocalComm
from engine.plugins.families import read_model
from engine.plugins.kinds import chosen_plugins
from engine.plugins.manager import Plugins
from engine.sampling.sampler import Sampler
from engine.scheduling.proposer import DraftModel
from engine.startup import loading, memory, pools
from engine.startup.memory import host_needs, pool_pages
from engine.types.errors import ConfigError, GraphError
from engine.workers.executor_main import load_rank
from engine.workers.executors import GenerationSettings
from engine.workers.group import WorkerSlot
from tests.graphs.engines import install
from tests.graphs.recording import RecordingDevice
from tests.graphs.runners import Steps, load, tokens
from tests.models.checkpoints import build, configuration, save

pytestmark = pytest.mark.slow

GB = 1_000_000_000
DEMO = Path(__file__).parents[2] / "examples" / "demo_model"


def config(**kv):
    sections = {"kv": {"page_size": 16, "memory_fraction": 0.5, **kv}, "scheduler": {"max_running": 8}}
    return with_device_defaults(build_config(Config(), {**sections, "device": {"kind": "cpu"}}))


def test_the_pool_gets_its_share_less_what_others_need():
    pages = {needs: pool_pages(config(), 1024, 1_000_000, GB, needs) for needs in (Needs(), Needs(10**8, 5 * 10**7))}
    assert list(pages.values()) == [500, 350]
    assert pool_pages(config(), 64, 1_000_000, GB, Needs()) == 64 // 16 * 8 * 4  # more would serve no request


def test_a_pool_without_room_for_one_sequence_is_refused_with_what_took_the_room():
    with pytest.raises(
        ConfigError, match=r"room for 0 pages .* after 0\.40 GB for a step, 0\.20 GB for graphs, one seq"
    ):
        pool_pages(config(), 1024, 1_000_000, GB, Needs(4 * 10**8, 2 * 10**8))


@pytest.mark.parametrize(
    "needs, levers",
    [
        (Needs(), "model.max_model_len, or"),
        (Needs(8), "model.max_model_len or scheduler.max_running or scheduler.max_step_tokens, or"),
        (
            Needs(8, 8),
            "model.max_model_len or scheduler.max_running or scheduler.max_step_tokens or graphs.max_tokens, or",
        ),
    ],
)
def test_what_can_be_lowered_is_what_the_room_went_to(needs, levers):
    with pytest.raises(ConfigError, match=f"raise it, lower {levers} set kv.num_pages"):
        pool_pages(set_length(16_000), 16_000, 1_000_000, GB, needs)


def set_length(tokens):
    return build_config(config(), {"model": {"max_model_len": tokens}})


def test_a_context_that_does_not_fit_is_lowered_unless_it_was_set(caplog):
    assert pool_pages(config(), 16_000, 1_000_000, GB, Needs(10**8)) == 400
    (line,) = [one.getMessage() for one in caplog.records]
    assert line == (
        "the context is lowered to 6400 tokens from the model's 16000: no more fit 1.00 GB of memory after 0.10 GB for "
        "a step; a smaller kv.dtype holds more"
    )
    with pytest.raises(ConfigError, match="room for 400 pages"):
        pool_pages(set_length(16_000), 16_000, 1_000_000, GB, Needs(10**8))
    with pytest.raises(ConfigError, match="room for 60 pages"):
        pool_pages(config(), 16_000, 1_000_000, GB, Needs(44 * 10**7))


def test_a_sampler_that_works_in_parts_is_not_estimated_as_one_that_does_not():
    shape = msgspec.structs.replace(read_model(DEMO).shape, vocab_size=151_936)
    small = msgspec.structs.replace(shape, vocab_size=1)
    section = build_config(Config(), {"scheduler": {"max_running": 64, "max_step_tokens": 64}})
    large, rest = (host_needs(section, one, 512, torch.float32).activation_bytes for one in (shape, small))
    scored = 64 * 151_936 * memory.SCORING_BYTES
    # The sampler alone, in a process of its own, took 120 MB.
    assert 120_000_000 < large - rest - scored < 150_000_000


def test_what_is_sampled_behind_proposals_is_counted():
    shape = msgspec.structs.replace(read_model(DEMO).shape, vocab_size=151_936)
    section = build_config(Config(), {"scheduler": {"max_running": 8, "max_step_tokens": 64}})
    needs = [host_needs(section, shape, 512, torch.float32, number).activation_bytes for number in (0, 1, 3, 7, 64)]
    scored = 151_936 * memory.SCORING_BYTES
    assert needs[1] - needs[0] >= 8 * scored
    assert needs[3] - needs[2] == 32 * scored
    assert needs[4] == needs[3]  # a step has no more tokens


def test_the_largest_step_samples_each_row_behind_its_proposals(monkeypatch):
    section = build_config(Config(), {"scheduler": {"max_running": 8, "max_step_tokens": 64}})
    seen = []

    class Steps:
        has_states = False

        def run(self, lengths, queries, num_sampled, params, num_rows=0):
            seen.append((int(queries.sum()), num_sampled, num_rows))

    for number in (0, 3, 64):
        memory.run_largest_step(section, 512, Steps(), number)
    assert seen == [(64, 8, 8), (64, 32, 8), (64, 64, 8)]
    Steps.has_states = True  # a step of all rows follows
    memory.run_largest_step(section, 512, Steps(), 0)
    assert seen[3:] == [(64, 8, 8), (8, 8, 0)]


@dataclass
class Kernel:
    element_bytes: float


class Keeper(Kernel):
    """One that takes rows as they are stored."""

    reads_rows = True

    def keep(self, target, rows):
        return True

    def keeps(self, weight_OI):
        return True


@pytest.mark.parametrize(
    "device, load_format, ranks, extra",
    [
        ("cpu", "safetensors", 1, "part"),
        ("cpu", "safetensors", 2, "part"),
        ("cpu", "dummy", 2, "whole"),
        ("cuda", "safetensors", 2, "none"),
        ("cuda", "dummy", 2, "whole"),
    ],
)
def test_loading_takes_a_copy_of_the_largest_tensor_where_it_makes_one(device, load_format, ranks, extra):
    shape = msgspec.structs.replace(read_model(DEMO).shape, tied=False)
    plan = Decoder(shape, Unconnected(0, ranks), torch.device("meta"), torch.bfloat16)
    largest = 4 * shape.vocab_size * shape.hidden_size
    more = loader.loading_bytes(plan, torch.device(device), load_format, Kernel(2)) - plan.parameter_bytes
    assert more == {"part": largest // ranks, "whole": largest, "none": 0}[extra]


def test_layers_that_are_rounded_one_by_one_take_less_on_a_cpu():
    shape = read_model(DEMO).shape
    plan = Decoder(shape, Unconnected(0, 1), torch.device("meta"), torch.float32)
    layer = sum(weight.numel() for one in plan.layers[0].linears for weight in [one.weight])
    for device, saved in (("cpu", 3 * layer * (shape.num_layers - 1)), ("cuda", 0)):
        whole, rounded = (
            loader.loading_bytes(plan, torch.device(device), "safetensors", Kernel(size)) for size in (4, 1)
        )
        assert whole - rounded == saved


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("table_in_blocks", [True, False])
def test_rows_that_are_kept_as_they_are_stored_are_never_counted_as_floats(tied, table_in_blocks):
    shape = msgspec.structs.replace(read_model(DEMO).shape, tied=tied)
    plan = Decoder(shape, Unconnected(0, 1), torch.device("meta"), torch.float32)
    slices = {one.source: one for one in plan.slices()}
    table = math.prod(slices["model.embed_tokens.weight"].shape)
    floats = {name for name, one in slices.items() if len(one.shape) == 1}
    floats |= set() if table_in_blocks else {"model.embed_tokens.weight", "lm_head.weight"}
    sizes = {name: math.prod(one.shape) * 4 // (1 if name in floats else 8) for name, one in slices.items()}
    tensors = {name: SimpleNamespace(num_bytes=size) for name, size in sizes.items()}
    more = loader.loading_bytes(plan, torch.device("cpu"), "safetensors", Keeper(0.5), SimpleNamespace(tensors=tensors))
    read = [sizes[one.source] for one in plan.slices()]  # a norm of heads is read for each of them
    assert more - sum(read) == max(read) + (4 * table if tied and not table_in_blocks else 0)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return save(build("qwen3"), tmp_path_factory.mktemp("qwen3"))


def test_an_engine_measures_before_it_allocates_and_says_so(checkpoint, monkeypatch, caplog):
    devices = install(monkeypatch)
    seen = []
    monkeypatch.setattr("engine.startup.pools.free_bytes", lambda device: 10 * GB)
    monkeypatch.setattr("engine.startup.pools.pool_pages", lambda *args: (seen.append(args[-1]), pool_pages(*args))[1])
    monkeypatch.setattr(RecordingDevice, "peak", lambda self, run: (run(), 7)[1])
    with caplog.at_level(logging.INFO):
        runner = load(checkpoint, "breakable", max_running=2, num_pages=0)
    assert seen[0].activation_bytes == 7
    steps = Steps(runner)
    for row in range(2):
        steps.prefill(row, 9)
    tokens(steps.decode(0, 1))
    (line,) = [one.getMessage() for one in caplog.records if " memory: " in one.getMessage()]
    assert f"KV pool {runner._pool.data.nbytes / 1e9:.2f} GB ({runner.num_pages} pages, {4 * runner.num_pages}" in line
    # Trial captures have a pool of their own, and nothing is left of them.
    (device,) = devices
    assert [bool(graphs) for graphs in device.dropped] == [True]
    assert device.trims


@pytest.mark.parametrize("num_backends", [1, 2])
def test_what_attention_and_graphs_keep_is_no_memory_for_pages(checkpoint, monkeypatch, num_backends):
    """The model has a backend and graphs, and so has a draft model beside it."""
    install(monkeypatch)
    taken, seen, measured = [0], [], []
    end, measure = RecordingDevice.end, Capturing.measure

    def with_memory(self):
        taken[0] += 1 << 20
        return end(self)

    monkeypatch.setattr(RecordingDevice, "end", with_memory)
    monkeypatch.setattr(
        Capturing, "measure", lambda *args, **more: (measured.append(measure(*args, **more)), measured[-1])[1]
    )
    build = RankAttention.build

    def with_a_workspace(self, pool):
        backend = build(self, pool)
        taken[0] += 128 << 20
        weakref.finalize(backend, lambda: taken.__setitem__(0, taken[0] - (128 << 20)))
        return backend

    monkeypatch.setattr(RankAttention, "build", with_a_workspace)
    monkeypatch.setattr(RecordingDevice, "memory", lambda self: DeviceMemory(10 * GB - taken[0], 0))
    monkeypatch.setattr("engine.startup.pools.free_bytes", lambda device: 10 * GB)
    monkeypatch.setattr("engine.startup.pools.pool_pages", lambda *args: (seen.append(args[-1]), pool_pages(*args))[1])
    system = System(
        build_config(
            Config(),
            {
                "model": {"path": str(checkpoint), "tokenizer": "none", "max_model_len": 64},
                "device": {"kind": "cpu"},
                "scheduler": {"max_running": 2, "max_step_tokens": 32},
                "graphs": {"mode": "breakable"},
                "plugins": {"attention": "torch"},
            },
        )
    )
    draft = DraftModel(path=str(checkpoint), num_tokens=2) if num_backends == 2 else None
    plugins = Plugins(chosen_plugins(system.config))
    loading.load_runner(
        system.config,
        system.spec,
        system.max_len,
        plugins,
        rank=0,
        progress=False,
        given={} if draft is None else {"speculation": msgspec.msgpack.encode({"draft": draft, "num_proposed": 2})},
    )
    assert seen[0].attention_bytes == num_backends * 128 << 20
    assert seen[0].graph_bytes == sum(measured)
    # Steps with prompts, decode steps; and drafts for one and for two rows, each of which is one graph.
    assert measured[2:] == ([2 << 20] if num_backends == 2 else [])
    assert min(measured) > 0


class StepSplitter(RecordingDevice):
    """Every capture takes a tenth of what is free to begin with, and less if one was there before."""

    def __init__(self):
        super().__init__()
        self.free = 1000

    def end(self):
        self.free -= 100 if not self.graphs else 8
        return super().end()

    def memory(self):
        return DeviceMemory(self.free, 0)


def test_all_graphs_are_counted_from_the_two_largest():
    device = StepSplitter()
    runs = []

    def record(size):
        device.begin_capture(None, size)
        device.end()

    trial = Capturing(device, LocalComm(), torch.device("cpu"))
    assert trial.measure((1, 2, 4, 8), runs.append, record, lambda: runs.append("forgotten"), advice="") == 100 + 3 * 8
    assert runs == [8, 4, "forgotten"]
    assert [graph.size for graph in device.graphs] == [8, 4]


def test_a_trial_that_fails_turns_graphs_off_or_is_an_error(checkpoint, monkeypatch, caplog):
    install(monkeypatch)

    def fail(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(DecodeGraphs, "_run", fail)
    with pytest.raises(GraphError, match=r"a trial capture failed .*out of memory.*lower graphs.max_rows"):
        load(checkpoint, "decode", num_pages=0)
    runner = load(checkpoint, "auto", num_pages=0)
    assert runner._whole_decodes is None
    assert "graphs are off: a trial capture failed" in caplog.text


def test_a_step_without_room_is_refused_at_start(checkpoint, monkeypatch):
    install(monkeypatch)

    def fail(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("engine.startup.pools.run_largest_step", fail)
    with pytest.raises(ConfigError, match=r"scheduler\.max_step_tokens=32: no room for a step of that size"):
        load(checkpoint, "breakable", num_pages=0)


def test_the_largest_step_has_as_many_tokens_and_rows_as_there_may_be(checkpoint, monkeypatch):
    install(monkeypatch)
    seen = []
    sample = Sampler.sample

    def watching(self, logits_NV, rows_N, *rest):
        seen.append((tuple(logits_NV.shape[:1]), rows_N.tolist()))
        return sample(self, logits_NV, rows_N, *rest)

    monkeypatch.setattr(Sampler, "sample", watching)
    load(checkpoint, "off", num_pages=0)
    assert seen == [((8,), list(range(8)))]


@pytest.mark.parametrize("load_format", ["safetensors", "dummy"])
def test_weights_that_cannot_fit_are_refused_before_anything_is_loaded(checkpoint, monkeypatch, load_format):
    def load_weights(*_):
        raise AssertionError("weights are loaded")

    monkeypatch.setattr(loading, "free_bytes", lambda device: 1 << 10)
    monkeypatch.setattr(loader, "_draw", load_weights)
    monkeypatch.setattr(loader.Filling, "fill", load_weights)
    with pytest.raises(ConfigError) as refused, LLM(checkpoint, progress=False, config={"model": dummy(load_format)}):
        pass
    (line,) = str(refused.value).splitlines()
    assert f"model.path={checkpoint}: its weights need 0." in line
    assert "in float32, 0.00 GB are available; free some, raise the container's limit, set model.dtype" in line


def dummy(load_format):
    return {"load_format": load_format, "tokenizer": "none", "dtype": "float32"}


@pytest.mark.parametrize("executor", ["inline", "process"])
def test_a_pool_larger_than_the_memory_is_one_line(checkpoint, executor):
    pool, model = {"num_pages": 10**9}, dummy("safetensors")
    with (
        pytest.raises(ConfigError) as refused,
        LLM(checkpoint, progress=False, config={"kv": pool, "model": model, "placement": {"executor": executor}}),
    ):
        pass
    (line,) = str(refused.value).splitlines()
    assert line.startswith("kv.num_pages=1000000000: ")
    assert " GB of memory asked for, " in line
    assert " GB are available, of which 90% may be used after " in line
    assert " GB for processes; lower it to " in line


PAGE_BYTES = 3 * 2 * 4 * 2 * 32 * 4  # 3 layers x keys and values x 4 tokens x 2 heads x 32 numbers of 4 bytes


def test_what_a_step_needs_on_a_cpu_is_kept_free_beside_a_given_number_of_pages(checkpoint, monkeypatch):
    monkeypatch.setattr(pools, "host_needs", lambda *_: Needs(GB))
    monkeypatch.setattr(pools, "free_bytes", lambda device: GB + 100 * PAGE_BYTES)
    assert load(checkpoint, "off", num_pages=90).num_pages == 90
    with pytest.raises(ConfigError, match=r"^kv\.num_pages=91: .* after 1\.00 GB for a step; lower it to 90 or less"):
        load(checkpoint, "off", num_pages=91)


@pytest.mark.parametrize("executor", ["inline", "process"])
def test_a_runner_that_comes_back_with_its_pages_is_not_asked_whether_they_fit(checkpoint, monkeypatch, executor):
    model = {"path": str(checkpoint), "tokenizer": "none", "dtype": "float32", "max_model_len": 64}
    sections = {"model": model, "device": {"kind": "cpu"}, "placement": {"executor": executor}}
    system = System(build_config(Config(), sections))
    terms = GenerationSettings(num_pages=100)
    monkeypatch.setattr(pools, "require_room", lambda *_: pytest.fail("asked"))
    if executor == "inline":
        assert system._load_runner(system.engine, 0, terms).num_pages == 100
        return
    monkeypatch.setattr("engine.workers.placement.start_child", lambda *_, assignment, **__: assignment)
    with system.placement(system.engine).generation(terms) as start:
        assignment = start(WorkerSlot("executor0", 0), None)
    assert assignment.config.kv.num_pages == 0
    assert load_rank(assignment).num_pages == 100


def test_a_pool_that_the_system_then_denies_is_one_line_as_well(checkpoint, monkeypatch):
    def deny(*_):
        raise MemoryError("cannot allocate")

    monkeypatch.setattr(pools, "new_pool", deny)
    with pytest.raises(
        ConfigError, match=r"no room for .* GB for a KV pool of 160 pages \(cannot allocate\); lower kv\.num_pages"
    ):
        load(checkpoint, "off")


def test_the_pool_of_a_cpu_takes_its_share_of_what_the_container_leaves(checkpoint, monkeypatch):
    spec = read_model(checkpoint)
    sections = {"scheduler": {"max_running": 8, "max_step_tokens": 32}, "graphs": {"mode": "off"}}
    needs = host_needs(build_config(Config(), sections), spec.shape, 64, torch.float32)
    monkeypatch.setattr(pools, "free_bytes", lambda device: int((needs.total + 100 * PAGE_BYTES) / 0.85) + 1)
    assert load(checkpoint, "off", num_pages=0).num_pages == 100
    # A process more that tokenizes has the room that these pages had.
    tokenizing = build_config(Config(), {**sections, "placement": {"tokenizers": 1}})
    assert host_needs(tokenizing, spec.shape, 64, torch.float32).total - needs.total == memory.PROCESS_BYTES


@pytest.mark.parametrize("max_len", [2048, 16384])
def test_the_largest_step_of_a_cpu_takes_no_more_than_was_estimated(tmp_path, max_len):
    config = json.loads((DEMO / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "max_position_embeddings": max_len}))
    told = largest_step(tmp_path, max_len, 2048)
    assert told["activations"] / 4 < told["taken"] < told["estimate"], told


def test_inputs_of_all_layers_are_part_of_the_estimate(tmp_path):
    kinds = ["sliding_attention", "full_attention"] * 4
    sizes = {"num_hidden_layers": 8, "layer_types": kinds, "hidden_size_per_layer_input": 512, "hidden_size": 256}
    config = configuration("gemma4", max_position_embeddings=2048, **sizes)
    config.architectures = ["Gemma4ForCausalLM"]
    config.save_pretrained(tmp_path)
    told = largest_step(tmp_path, 2048, 4096)
    assert told["taken"] < told["activations"], told


def largest_step(checkpoint, max_len, num_tokens):
    """Run the largest step in a process of its own; return what it took, and the estimates."""
    command = [sys.executable, "-m", "tests.execution.largest_step", str(checkpoint), str(max_len), str(num_tokens)]
    output = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=600).stdout
    return json.loads(output.splitlines()[-1])
