"""model.numerics=invariant: a start proves every part, and names the one that does not hold."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from engine.config import Config, build_config
from engine.execution.attention import RankAttention
from engine.execution.batch import Int32, Int64, lay_out
from engine.execution.captured_steps import Decoded
from engine.execution.host_rows import HostRows
from engine.execution.split_attention import SplitAttention
from engine.kernels import attention
from engine.kernels.attention import CompiledAttention
from engine.kernels.cpu import cpu_kernels
from engine.layers.attention import AttentionBackend, AttentionBatch, AttentionSpec
from engine.layers.comm import Comm
from engine.layers.experts import Experts
from engine.layers.kernels import LayerKernels
from engine.layers.kv_pool import KVPool, Layout
from engine.layers.mlp import DIVIDED, GatedMLP, activated_by_rows
from engine.layers.ordered_comm import OrderedComm
from engine.layers.packing import LinearKernel, Linears
from engine.messages import Step
from engine.models.decoder import Decoder
from engine.models.loader import build_model, load_model
from engine.plugins.attention import tiles
from engine.plugins.attention.tiles import TiledAttention
from engine.plugins.attention.torch import TorchAttention
from engine.plugins.comm.local import LocalComm
from engine.plugins.families import read_model
from engine.plugins.linear.onednn import OneDNN
from engine.plugins.linears import check_linear_fits, fitting_linears, linear_context
from engine.plugins.manager import Plugins
from engine.plugins.selection import expected_context, first_fit
from engine.sampling import sampler
from engine.sampling.captured import SamplingVariant
from engine.sampling.sampler import Sampler
from engine.settings.own_kernels import c_compiler
from engine.settings.sections import PluginsSection
from engine.startup import invariance
from engine.startup.invariance import pieces, prove_decodes, prove_invariance, require_provable
from engine.startup.loading import _check_device
from engine.types.errors import ConfigError, PluginError
from tests.models.checkpoints import build, save

DEMO = Path(__file__).parents[2] / "examples" / "demo_model"
CPU = torch.device("cpu")
Factory = Callable[[AttentionSpec, KVPool], AttentionBackend]


class OneScale:
    """Rounds its input to 8 bits by one scale for the whole batch."""

    element_bytes = 4.0

    def pack(self, weight_OI: torch.Tensor) -> "OneScaleWeight":
        return OneScaleWeight(weight_OI)


class OneScaleWeight:
    def __init__(self, weight_OI: torch.Tensor) -> None:
        self._exact = OneDNN(4, invariant=True).pack(weight_OI.clone())
        self.nbytes = weight_OI.nbytes

    def __call__(self, x_TI: torch.Tensor, bias_O: torch.Tensor | None) -> torch.Tensor:
        assert self._exact is not None
        scale = x_TI.abs().max() / 127
        return self._exact((x_TI / scale).round() * scale, bias_O)


def model(kernel: LinearKernel | None = None, kernels: LayerKernels | None = None) -> Decoder:
    linears = Linears(kernel or OneDNN(4, invariant=True), OneDNN(4, invariant=True))
    spec = read_model(DEMO, PluginsSection())
    decoder = load_model(spec, LocalComm(), CPU, torch.float32, "dummy", 1, False, linears, kernels=kernels)
    decoder.by_rows()
    return decoder


class Attention(RankAttention):
    """A backend that no plugin has."""

    def __init__(self, factory: Factory, spec: AttentionSpec) -> None:
        self._factory, self._own_spec = factory, spec

    def build(self, pool: KVPool) -> AttentionBackend:
        return self._factory(self._own_spec, pool)


def prove(decoder: Decoder, factory: Factory = TiledAttention, comm: Comm | None = None) -> None:
    attention = Attention(factory, decoder.attention_spec)
    sizes = {"page_size": 16, "max_tokens": 200, "max_rows": 16}
    place = {"device": CPU, "layout": "layer_first", "kv_dtype": ""}
    sampling = Sampler(16, decoder.vocab_size, 64, CPU, decoder.kernels)
    prove_invariance(decoder, attention, comm or LocalComm(), sampling, **place, **sizes)


def test_what_auto_takes_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = model()
    rank = RankAttention(Plugins({"attention": "auto"}), decoder.attention_spec, 16, CPU, torch.float32, invariant=True)
    pool = KVPool(5, 8, 16, 2, 64, torch.float32, CPU)
    if c_compiler():
        assert isinstance(rank.build(pool), CompiledAttention)
        prove(decoder, tiles.built)
        prove(model(kernels=cpu_kernels()), tiles.built)
    monkeypatch.setattr(attention, "compiled", lambda: None)
    assert isinstance(rank.build(pool), TiledAttention)
    prove(decoder)


@pytest.mark.parametrize(
    ("factory", "named"),
    [
        (
            lambda spec, pool: SplitAttention(prefill=TorchAttention(spec, pool), decode=TiledAttention(spec, pool)),
            "chunk",
        ),
        (
            lambda spec, pool: SplitAttention(prefill=TiledAttention(spec, pool), decode=TorchAttention(spec, pool)),
            "padded",
        ),
    ],
    ids=["blocks that begin with the chunk", "decodes padded to the longest"],
)
def test_attention_that_depends_on_the_step_is_named(factory: Factory, named: str) -> None:
    with pytest.raises(ConfigError, match=r"invariant does not hold .*: attention: layer 0, sequence .*numerics=fast"):
        prove(model(), factory)


@pytest.mark.parametrize(
    ("kernel", "part"),
    [(OneDNN(4), "queries, keys and values"), (OneScale(), "MLP")],
    ids=["another product for one row", "one scale for the batch"],
)
def test_a_product_that_depends_on_the_batch_is_named(kernel: LinearKernel, part: str) -> None:
    with pytest.raises(ConfigError, match=f"layer 0's {part} gives a row other bits among 1 than among 200"):
        prove(model(kernel))


@pytest.mark.parametrize("variant", ["qwen3-5-moe", "glm4-moe", "gpt-oss", "nemotron-h-experts"])
def test_experts_and_their_choice_are_by_rows(variant: str, tmp_path: Path) -> None:
    """Routers of all kinds: softmax and sigmoid, corrected and not, with a shared expert that has a gate."""
    spec = read_model(save(build(variant), tmp_path), PluginsSection())
    kernel = OneDNN(4, invariant=True)

    def loaded(exact: LinearKernel) -> Decoder:
        place = (LocalComm(), CPU, torch.float32)
        decoder = load_model(spec, *place, "dummy", 1, False, Linears(kernel, kernel, exact), kernels=cpu_kernels())
        assert isinstance(decoder, Decoder)
        decoder.by_rows()
        return decoder

    assert not _differing(loaded(kernel))
    assert _differing(loaded(OneScale()))


def _differing(decoder: Decoder) -> list[int]:
    """Return the layers whose mixture of experts gives a row other bits among fewer rows."""
    x_TD = torch.randn(200, decoder.shape.hidden_size, generator=torch.Generator().manual_seed(1))
    found, kernels = [], decoder.kernels
    for index, mlp in ((index, one.mlp) for index, one in enumerate(decoder.layers)):
        if isinstance(mlp, Experts):
            whole = mlp(x_TD.clone(), kernels)
            parts = [mlp(x_TD[first:last].clone(), kernels) for first, last in pieces(200)]
            found += [] if torch.equal(torch.cat(parts), whole) else [index]
    return found


def test_log_probabilities_that_depend_on_the_batch_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    exact = invariance.batch_logprobs

    def rounded_by_batch(logits_NV: torch.Tensor, *others: torch.Tensor) -> object:
        return exact(logits_NV - logits_NV.mean(), *others)  # type: ignore[arg-type]

    monkeypatch.setattr(invariance, "batch_logprobs", rounded_by_batch)
    with pytest.raises(ConfigError, match=r"the log softmax gives a row other bits among [12] than among 128"):
        prove(model())


def test_a_sampler_that_depends_on_the_batch_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    exact = sampler.uniforms

    def shared(starts_N: torch.Tensor, positions_N: torch.Tensor) -> torch.Tensor:
        return exact(starts_N[:1].expand_as(starts_N), positions_N)

    monkeypatch.setattr(sampler, "uniforms", shared)
    with pytest.raises(ConfigError, match=r"the sampler gives a row other bits among [1-5] than among 16"):
        prove(model())


@pytest.mark.parametrize("window", [0, 200])
def test_a_long_chunk_is_added_up_in_parts_with_the_same_bits(window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    length, count, limit = 700, 500, 1 << 18
    spec = AttentionSpec(1, 6, 2, 16, 0.25, window=window)
    pool = KVPool(1, 44, 16, 2, 16, torch.float32, CPU)
    for slots in (pool.keys(0), pool.values(0)):
        slots.normal_()
    q_TNH = torch.randn(count, 6, 16)
    batch = AttentionBatch(
        num_decodes=0,
        page_table_BP=torch.arange(44, dtype=torch.int32)[None],
        lengths_B=torch.tensor([length]),
        query_starts_B1=torch.tensor([0, count]),
        host_lengths=np.array([length], dtype=np.int32),
        host_query_lengths=np.array([count], dtype=np.int32),
    )
    at_once = TiledAttention(spec, pool)
    at_once.plan_step(batch)
    expected_TNH = at_once.attend(0, q_TNH)
    monkeypatch.setattr(tiles, "RESULT_BYTES", limit)
    monkeypatch.setattr(tiles, "weighted_mean", within := Within(limit))
    in_parts = TiledAttention(spec, pool)
    in_parts.plan_step(batch)
    assert torch.equal(in_parts.attend(0, q_TNH), expected_TNH)  # bits of torch's products of one tile, made twice
    assert within.calls > 1


class Within:
    """``weighted_mean`` of results that take so many bytes at most."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._mean = tiles.weighted_mean
        self.calls = 0

    def __call__(self, results: list[tuple[tiles.Spans, torch.Tensor, torch.Tensor]], q: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        assert sum(out.nbytes for _, out, _ in results) <= self._limit
        return self._mean(results, q)


def test_every_small_number_of_rows_is_tried_and_every_row_once() -> None:
    found = pieces(200)
    assert [last - first for first, last in found][:10] == [1, 2, 3, 4, 5, 6, 7, 8, 10, 12]
    assert [row for first, last in found for row in range(first, last)] == list(range(200))
    assert pieces(1) == [(0, 1)]


def test_activations_are_cut_where_no_thread_begins() -> None:
    width = 432
    x_TI = torch.randn(200, 2 * width).chunk(2, -1)[0]
    assert x_TI.numel() > DIVIDED
    found = activated_by_rows(x_TI, "silu")
    torch.testing.assert_close(found, F.silu(x_TI))
    for first, last in ((0, 1), (3, 100), (199, 200)):
        assert torch.equal(activated_by_rows(x_TI[first:last], "silu"), found[first:last])


@pytest.mark.parametrize("kind", ["silu", "gelu", "gelu_pytorch_tanh"])
@pytest.mark.parametrize(("width", "parts"), [(432, (216, 108)), (512, (256, 64))])
def test_an_activation_has_the_same_bits_on_any_number_of_ranks(width: int, parts: tuple[int, int], kind: str) -> None:
    gate_up = torch.randn(12, 2 * width, generator=torch.Generator().manual_seed(1)) * 3
    whole = activated_by_rows(gate_up.chunk(2, -1)[0], kind)
    for part in parts:
        for rows in (12, 1):
            mine = torch.cat((gate_up[:rows, :part], gate_up[:rows, -part:]), 1).chunk(2, -1)[0]
            assert torch.equal(activated_by_rows(mine, kind), whole[:rows, :part])


def test_activations_of_a_model_are_by_rows() -> None:
    assert isinstance(model().layers[0].mlp, GatedMLP)


def test_sums_of_ranks_are_in_the_order_of_ranks() -> None:
    parts = torch.tensor([1.0, 1e8, -1e8, 1.0]).view(4, 1)

    class Gathered(LocalComm):
        rank, size = 0, 4

        def all_gather(self, tensor: torch.Tensor, dim: int = -1) -> torch.Tensor:
            assert tensor.shape == (1, 1)
            assert dim == 0
            return parts

    assert OrderedComm(Gathered()).all_reduce(torch.ones(1)).item() == 1.0  # 1 + 1e8 loses the one


@pytest.mark.parametrize(
    ("variant", "device", "said"),
    [
        ("mixtral", "cuda", "has experts"),
        ("deepseek-v2", "cpu", "keep latents"),
        ("qwen3", "cuda", ""),
        ("mixtral", "cpu", ""),
    ],
)
def test_parts_that_are_known_not_to_hold_are_refused_by_shapes_alone(
    variant: str, device: str, said: str, tmp_path: Path
) -> None:
    spec = read_model(save(build(variant), tmp_path), PluginsSection())
    plan = build_model(spec.shape, LocalComm(), torch.device("meta"), torch.float32)
    if not said:
        require_provable(plan, torch.device(device))
        return
    with pytest.raises(ConfigError, match=rf"invariant: this model.* {said}.*; set model\.numerics=fast"):
        require_provable(plan, torch.device(device))


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_what_a_compiler_makes_is_refused(device: str) -> None:
    config = build_config(Config(), {"model": {"numerics": "invariant"}, "graphs": {"mode": "compiled"}})
    with pytest.raises(ConfigError, match=r"model\.numerics=invariant with graphs\.mode=compiled"):
        _check_device(config, torch.device(device))


def test_on_a_gpu_auto_takes_kernels_of_one_size_of_tiles() -> None:
    pytest.importorskip("triton", reason="triton is not published for this system")
    config = build_config(Config(), {"model": {"numerics": "invariant", "dtype": "bfloat16"}})
    plugins = Plugins({})
    chosen, passed_over = first_fit(plugins.known, expected_context(config, None, device="cuda"), {})
    assert chosen is not None
    assert chosen.short == "triton"
    assert any(one.startswith("tiles: device cuda") for one in passed_over)
    linears = fitting_linears(plugins.known, linear_context(config, "bfloat16", device="cuda"))
    assert [one.short for one in linears] == ["triton"]
    fast = fitting_linears(plugins.known, linear_context(Config(), "bfloat16", device="cuda", dtype="bfloat16"))
    assert "triton" not in [one.short for one in fast]
    rounded = build_config(config, {"model": {"quantization": "int8"}})
    with pytest.raises(PluginError, match=r"no built-in kernel on cuda for bfloat16 with model\.numerics=invariant"):
        check_linear_fits(plugins, linear_context(rounded, "bfloat16", device="cuda"))


def test_a_backend_that_declares_nothing_is_refused_before_anything_is_loaded() -> None:
    spec = model().attention_spec
    with pytest.raises(PluginError, match=r"numerics is invariant, its results depend on what else is in a step"):
        RankAttention(Plugins({"attention": "torch"}), spec, 16, CPU, torch.float32, invariant=True)


class Decodes:
    """What the model gives, with something added; see ``CapturedDecodes``."""

    def __init__(self, decoder: Decoder, pool: KVPool, rows: HostRows, more: float) -> None:
        self._decoder, self._pool, self._rows, self._more = decoder, pool, rows, more

    def fits(self, num_rows: int) -> bool:
        return num_rows > 0

    def variant_of(self, rows_N: Int64, positions_N: Int64) -> SamplingVariant:
        raise AssertionError("logits are compared, whatever is sampled")

    def tell(self, step: Step) -> None:
        raise AssertionError("the rows are told before")

    def launch(self, rows_N: Int64, lengths_N: Int32, variant: SamplingVariant) -> Decoded:
        self._rows.computed[rows_N] = lengths_N - 1
        batch = lay_out(Step(step_id=0, decode_rows=rows_N.astype(np.int32).tobytes()), self._rows.computed)
        inputs = self._rows.inputs(batch)
        backend = tiles.built(self._decoder.attention_spec, self._pool)
        logits_NV = self._decoder.forward(inputs.planned(batch, backend, self._pool))
        return Decoded(None, None, logits_NV + self._more, inputs.write_at_N)


@pytest.mark.parametrize("max_len", [64, 10], ids="contexts of {}".format)
@pytest.mark.parametrize("layout", ["layer_first", "page_first"])
def test_decode_steps_in_one_call_must_have_the_bits_of_layers(layout: Layout, max_len: int) -> None:
    decoder = model()
    spec = decoder.attention_spec
    pool = KVPool(spec.num_layers, 12, 16, spec.num_kv_heads, spec.head_size, torch.float32, CPU, layout)
    backend = tiles.built(spec, pool)
    rows = HostRows(16, max_len, 16, CPU, pool.page_stride)
    prove_decodes(decoder, Decodes(decoder, pool, rows, 0.0), backend, pool, rows)
    with pytest.raises(ConfigError, match=r"decode steps in one call of C give other bits"):
        prove_decodes(decoder, Decodes(decoder, pool, rows, 1e-5), backend, pool, rows)
