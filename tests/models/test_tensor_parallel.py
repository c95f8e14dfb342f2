"""A model cut over ranks is the same model: logits, dummy weights, and what cannot be cut."""

from typing import Literal

import pytest
import torch
from msgspec import structs

from engine.checkpoints.checkpoint import ModelSpec
from engine.checkpoints.shape import ExpertsShape
from engine.kernels.attention import compiled_attention
from engine.kernels.cpu import cpu_kernels
from engine.kernels.panels import PanelKind, products
from engine.layers.comm import Comm, Unconnected
from engine.layers.experts import Experts
from engine.layers.ordered_comm import OrderedComm
from engine.layers.packing import Linears
from engine.layers.part import FeedForward, build
from engine.models.decoder import Decoder
from engine.models.loader import load_model
from engine.plugins.comm.local import LocalComm
from engine.plugins.families import read_model
from engine.plugins.linear.onednn import onednn_linears
from engine.plugins.linear.panels import Panels
from engine.plugins.testing.steps import Driver
from engine.plugins.testing.threads import ThreadComm, on_ranks
from engine.settings.sections import ModelSection
from engine.types.errors import ConfigError, WeightsError
from tests.models.checkpoints import LAYERED, NOT_PLAIN, random_tokens, reference_logits
from tests.models.conftest import Cases

# Two key/value heads each: four ranks hold copies of them.  259 tokens: no number of ranks divides the vocabulary.
VARIANTS = ["llama", "llama-biases", "qwen2-tied-upper-window", "qwen3-tied", "qwen3-yarn-bias", *NOT_PLAIN, *LAYERED]


def load_rank(spec: ModelSpec, comm: Comm, load_format: str = "safetensors") -> Decoder:
    return load_model(
        spec,
        comm,
        torch.device("cpu"),
        torch.float32,
        load_format,
        7,
        linears=onednn_linears(torch.float32),
        progress=False,
    )


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("size", [2, 4])
def test_every_rank_gives_the_logits_of_the_whole_model(cases: Cases, variant: str, size: int):
    case = cases[variant]
    tokens = random_tokens(20, 5)

    def work(comm: ThreadComm) -> torch.Tensor:
        driver = Driver(load_rank(case.spec, comm), page_size=4)
        steps = [tokens[:12], *([token] for token in tokens[12:])]
        return torch.cat([driver.step({"a": step})["a"] for step in steps])

    expected = reference_logits(case.reference, tokens)
    for logits in on_ranks(size, work):
        assert logits.shape == expected.shape
        assert (logits - expected).abs().max() <= 1e-4


@pytest.mark.skipif(products() is None, reason="there is no C compiler, or no AVX2")
@pytest.mark.parametrize("variant", ["llama", "llama-biases", "qwen2-tied-upper-window", "qwen3-yarn-bias"])
@pytest.mark.parametrize("kind", [None, PanelKind.BYTES], ids=str)
def test_ranks_that_add_nothing_up_give_the_bits_of_one(cases: Cases, variant: str, kind: PanelKind | None):
    spec, tokens = cases[variant].spec, random_tokens(20, 5)
    functions = products()
    assert functions is not None
    linears = Linears(*[Panels(functions, kind, 4.0)] * 2)

    def work(comm: ThreadComm) -> torch.Tensor:
        group = OrderedComm(comm) if comm.size > 1 else comm
        given = (spec, group, torch.device("cpu"), torch.float32, "safetensors", 0)
        driver = Driver(load_model(*given, linears=linears, kernels=cpu_kernels(), progress=False), page_size=4)
        driver.attention = compiled_attention(driver.model.attention_spec, driver.pool) or driver.attention
        return torch.cat([driver.step({"a": step})["a"] for step in (tokens[:12], *([one] for one in tokens[12:]))])

    (expected,) = on_ranks(1, work)
    for size in (2, 4):
        assert all(torch.equal(logits, expected) for logits in on_ranks(size, work))


@pytest.mark.parametrize(
    ("variant", "size", "how"),
    [
        ("qwen3-moe", 2, "divided"),
        ("mixtral", 2, "divided"),
        ("gpt-oss", 4, "divided"),
        ("deepseek-v3", 2, "divided"),
        ("qwen3-moe", 4, "exchanged"),
        ("mixtral", 2, "exchanged"),
        ("gpt-oss", 4, "exchanged"),
    ],
)
def test_ranks_that_divide_experts_give_the_logits_of_the_whole_model(
    cases: Cases, variant: str, size: int, how: Literal["divided", "exchanged"]
):
    """Each reads its own ones alone.  Five experts of Mixtral and gpt-oss: the first ranks have one more."""
    case = cases[variant]
    spec = read_model(case.directory, model=ModelSection(experts=how))
    tokens = random_tokens(20, 5)
    num_experts = next(one.mlp for one in spec.shape.layers if isinstance(one.mlp, ExpertsShape)).num_experts

    def work(comm: ThreadComm) -> tuple[torch.Tensor, torch.Tensor, int]:
        model = load_rank(spec, comm)
        (*_, experts) = (layer.mlp for layer in model.layers if isinstance(layer.mlp, Experts))
        steps = [tokens[:12], *([token] for token in tokens[12:])]
        driver, dummy = Driver(model, page_size=4), Driver(load_rank(spec, comm, "dummy"))
        logits = torch.cat([driver.step({"a": step})["a"] for step in steps])
        return logits, dummy.step({"a": tokens})["a"], len(experts.experts)

    expected = reference_logits(case.reference, tokens)
    (dummy,) = on_ranks(1, lambda comm: Driver(load_rank(case.spec, comm, "dummy")).step({"a": tokens})["a"])
    found = on_ranks(size, work)
    for logits, of_dummy, _ in found:
        assert (logits - expected).abs().max() <= 1e-4
        assert (of_dummy - dummy).abs().max() <= 1e-5
    held = [number for *_, number in found]
    assert sum(held) == num_experts
    assert max(held) - min(held) <= 1


def test_experts_that_cannot_be_divided_are_refused(cases: Cases):
    section = ModelSection(experts="divided")
    with pytest.raises(ConfigError, match='"divided": LlamaForCausalLM has no experts that ranks could divide; set it'):
        read_model(cases["llama"].directory, model=section)
    exchanged = ModelSection(experts="exchanged")
    with pytest.raises(ConfigError, match='"exchanged": every rank has a result of the shared expert of Deep'):
        read_model(cases["deepseek-v3"].directory, model=exchanged)
    shape = read_model(cases["mixtral"].directory, model=section).shape.layers[0].mlp
    with pytest.raises(ConfigError, match=r'"divided": 5 experts are too few for 8 ranks; set it to "cut", or dev'):
        build(FeedForward, shape, 64, Unconnected(0, 8), torch.device("meta"), torch.float32)


def test_key_value_heads_are_copied_when_ranks_exceed_them(cases: Cases):
    specs = on_ranks(4, lambda comm: load_rank(cases["llama"].spec, comm).attention_spec)
    assert [(one.num_heads, one.num_kv_heads) for one in specs] == [(1, 1)] * 4


@pytest.mark.parametrize("size", [1, 2, 4])
def test_dummy_weights_do_not_depend_on_the_number_of_ranks(cases: Cases, size: int):
    spec = cases["qwen3-yarn-bias"].spec
    tokens = random_tokens(9, 6)

    def work(comm: ThreadComm) -> torch.Tensor:
        return Driver(load_rank(spec, comm, "dummy")).step({"a": tokens})["a"]

    (expected,) = on_ranks(1, work)
    assert expected.std() > 0
    for logits in on_ranks(size, work):
        assert (logits - expected).abs().max() <= 1e-5


def test_ranks_that_cannot_share_the_heads_are_refused(cases: Cases):
    with pytest.raises(ConfigError, match="num_attention_heads=4, which 3 ranks"):
        load_rank(cases["llama"].spec, ThreadComm(0, [None] * 3, None))


def test_every_parameter_element_is_described_exactly_once(cases: Cases):
    """Marking every slice's target once must mark every element once, and nothing of the reference is left out."""
    for variant in ("llama-biases", "qwen3-tied"):
        model = Decoder(cases[variant].spec.shape, LocalComm(), torch.device("cpu"), torch.float32)
        slices = list(model.slices())
        for one in slices:
            one.target.zero_()
        for one in slices:
            one.target.add_(1)
        assert all((one.target == 1).all() for one in slices)
        sources = {one.source: one.stored_shape for one in slices}
        reference = {name: tuple(one.shape) for name, one in cases[variant].reference.named_parameters()}
        assert sources == reference


def test_no_memory_for_the_weights_is_an_error_of_the_checkpoint(cases: Cases):
    spec = cases["llama"].spec
    huge = structs.replace(spec, shape=structs.replace(spec.shape, vocab_size=1 << 28, hidden_size=1 << 18))
    with pytest.raises(WeightsError, match="GiB, too much for cpu"):
        load_rank(huge, LocalComm(), "dummy")
