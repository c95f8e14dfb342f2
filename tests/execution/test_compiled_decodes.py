"""Decode steps in one call of C, next to the same decoder layer by layer."""

import numpy as np
import pytest
import torch

from engine.execution.compiled_decodes import compiled_decodes
from engine.kernels import attention
from engine.kernels.attention import compiled_attention
from engine.kernels.cpu import cpu_kernels
from engine.kernels.panels import PanelKind, products
from engine.layers.packing import Linears
from engine.messages import Step
from engine.models.loader import load_model
from engine.plugins.comm.local import LocalComm
from engine.plugins.families import read_model
from engine.plugins.linear.panels import Panels
from engine.plugins.testing.steps import Driver
from engine.sampling.captured import SamplingVariant
from engine.sampling.state import Newcomer
from engine.types.params import SamplingParams
from tests.execution.compiled_rows import MAX_LEN, MAX_ROWS, Rows
from tests.models.checkpoints import VOCAB, build, random_tokens, save

pytestmark = pytest.mark.skipif(products() is None, reason="there is no C compiler, or no AVX2")
PROMPTS = {"a": 3, "b": 40, "c": 17}
TAKEN = (
    *("llama", "llama-tied", "llama-biases", "llama-multi-head", "llama-head-dim", "llama3-rope", "mistral-window"),
    *("qwen2", "qwen2-tied-upper-window", "qwen3-tied", "qwen3-yarn-bias", "granite"),
    *("qwen3-5", "lfm2", "granite4-hybrid", "bamba", "lfm2-biases", "smollm3", "phi4-longrope"),
)
LEFT = ("llama-gelu", "gemma2", "gemma3", "olmo2", "cohere", "qwen3-next", "falcon-h1", "olmo-hybrid")


def driven(variant: str, folder, kind: PanelKind | None = None) -> Rows:
    """Three sequences that have been computed, layer by layer."""
    spec = read_model(save(build(variant), folder))
    functions = products()
    assert functions is not None
    kernel = Panels(functions, kind, 4.0)
    given = (spec, LocalComm(), torch.device("cpu"), torch.float32, "safetensors", 0)
    driver = Driver(load_model(*given, linears=Linears(kernel, kernel), kernels=cpu_kernels(), progress=False))
    driver.attention = compiled_attention(driver.model.attention_spec, driver.pool) or driver.attention
    driver.step({name: random_tokens(length, length) for name, length in PROMPTS.items()}, rows="none")
    return Rows(driver)


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def forget_last(driver: Driver) -> None:
    """Return keys and values of every sequence in all layers."""
    for one in driver.sequences.values():
        page, offset = divmod(len(one.tokens) - 1, driver.pool.page_size)
        for layer in range(driver.model.attention_spec.num_layers):
            for slots in (driver.pool.keys(layer), driver.pool.values(layer)):
                slots[one.pages[page] * driver.pool.page_stride + offset] = torch.nan


@pytest.mark.parametrize("variant", TAKEN)
@pytest.mark.parametrize("kind", [None, PanelKind.BYTES], ids=str)
def test_it_has_the_bits_of_layer_by_layer_with_any_threads(tmp_path, variant, kind, monkeypatch):
    monkeypatch.setattr(attention, "WORTH_THREADS", 0)
    rows = driven(variant, tmp_path, kind)
    driver, decodes = rows.driver, rows.whole
    for token in range(5):
        expected = rows.step({n: [(7 * token + i) % VOCAB] for i, n in enumerate(PROMPTS)})
        stored = driver.pool.data.clone()
        for threads, asked in (
            (1, SamplingVariant.LOGITS),
            (2, SamplingVariant.LOGITS),
            (1 + token % 2, SamplingVariant.GREEDY),
        ):
            torch.set_num_threads(threads)
            rows_N, lengths_N = rows.told()
            rows.rows.tokens_RM[rows_N, lengths_N] = 0
            forget_last(driver)
            with torch.inference_mode():
                found = decodes.launch(rows_N, lengths_N, asked)
            assert torch.equal(driver.pool.data.nan_to_num(3e38), stored.nan_to_num(3e38))
            assert rows.have_states_of_driver()
            if asked is SamplingVariant.LOGITS:
                assert torch.equal(found.logits_NV, expected)
                assert not rows.rows.tokens_RM[rows_N, lengths_N].any()
                rows.rows.write_sampled(found.write_at_N, torch.full((3,), 9))
                assert rows.rows.tokens_RM[rows_N, lengths_N].tolist() == [9, 9, 9]
            else:
                assert found.token_ids_N.tolist() == expected.argmax(-1).tolist()
                assert torch.equal(rows.rows.tokens_RM[rows_N, lengths_N].long(), found.token_ids_N)
        rows.rows.tokens_RM.zero_()


def test_a_row_of_one_token_begins_with_a_state_of_zeros(tmp_path):
    rows = driven("qwen3-5", tmp_path)
    driver = rows.driver
    driver.sequences.clear()
    expected = rows.step({name: [token] for token, name in enumerate(PROMPTS)})
    assert not expected.isnan().any()  # though the states were NaN
    with torch.inference_mode():
        found = rows.whole.launch(*rows.told(), SamplingVariant.LOGITS)
    assert torch.equal(found.logits_NV, expected)
    assert rows.have_states_of_driver()


@pytest.mark.parametrize("variant", LEFT)
def test_what_c_does_not_compute_is_left_to_torch(tmp_path, variant):
    assert driven(variant, tmp_path).decodes is None


def test_a_decoder_that_is_derived_from_ours_is_left_to_its_own_methods(tmp_path):
    rows = driven("llama", tmp_path)
    model = rows.driver.model
    model.__class__ = type("OwnDecoder", (type(model),), {"logits": lambda self, x_ND: -self.normed(x_ND)})
    given = (rows.driver.pool, rows.driver.attention, rows.rows, rows.sampler, LocalComm())
    assert compiled_decodes(model, *given) is None


def test_it_fits_any_rows(tmp_path):
    decodes = driven("llama", tmp_path).whole
    assert [decodes.fits(num) for num in (0, 1, MAX_ROWS)] == [False, True, True]


@pytest.mark.parametrize(
    ("params", "variant"),
    [
        (SamplingParams(temperature=0.0, min_tokens=1), SamplingVariant.GREEDY),
        (SamplingParams(temperature=0.0, min_tokens=9, stop_token_ids=(5,)), SamplingVariant.LOGITS),
        (SamplingParams(temperature=0.7), SamplingVariant.LOGITS),
        (SamplingParams(temperature=0.0, logprobs=0), SamplingVariant.LOGITS),
        (SamplingParams(temperature=0.0, logit_bias={3: 1.0}), SamplingVariant.LOGITS),
        (SamplingParams(temperature=0.0, presence_penalty=0.5), SamplingVariant.LOGITS),
    ],
)
def test_only_rows_that_take_their_likeliest_token_get_it_from_c(tmp_path, params, variant):
    rows = driven("llama", tmp_path)
    rows_N, lengths_N = rows.told()
    rows.sampler.admit((Newcomer(int(rows_N[1]), params, np.arange(38, dtype=np.int32), 36),), ())
    assert rows.whole.variant_of(rows_N, lengths_N.astype(np.int64)) is variant


def test_pages_are_told_before_a_step(tmp_path):
    rows = driven("llama", tmp_path)
    columns = {"table_rows": [3, 4], "table_indexes": [2, 0], "table_pages": [17, 19]}
    rows.whole.apply(
        Step(step_id=1, **{name: np.array(values, np.int32).tobytes() for name, values in columns.items()})
    )
    assert rows.rows.pages_RP[[3, 4], [2, 0]].tolist() == [17, 19]


@pytest.mark.parametrize(
    ("place", "value", "said"),
    [
        ("token", VOCAB, f"token 39 of row 0, {VOCAB}, is not among the model's {VOCAB}"),
        ("token", -1, "token 39 of row 0, -1, is not among"),
        ("page", 1 << 30, "row 0 with 40 tokens is not among the 6, is longer than its 5 pages, or has a page"),
        ("page", -1, "row 0 with 40 tokens is not"),
        ("row", MAX_ROWS, "row 6 with 40 tokens is not among the 6"),
        ("length", MAX_LEN + 1, "row 0 with 81 tokens is not among the 6, is longer than its 5 pages"),
        ("length", 0, "row 0 with 0 tokens is not"),
    ],
)
def test_a_row_that_cannot_be_is_named(tmp_path, place, value, said):
    rows = driven("llama", tmp_path)
    rows_N, lengths_N = rows.told()
    if place == "token":
        rows.rows.tokens_RM[0, 39] = value
    elif place == "page":
        rows.rows.pages_RP[0, 1] = value
    else:
        {"row": rows_N, "length": lengths_N}[place][1] = value
    before = rows.rows.tokens_RM.clone()
    with torch.inference_mode(), pytest.raises(IndexError, match=said):
        rows.whole.launch(rows_N, lengths_N, SamplingVariant.GREEDY)
    assert torch.equal(rows.rows.tokens_RM, before)


def test_a_row_that_is_not_finite_reaches_no_other(tmp_path):
    rows = driven("llama", tmp_path)
    driver = rows.driver
    expected = [int(one.argmax()) for one in driver.step({name: [4] for name in PROMPTS}).values()]
    driver.pool.keys(1)[driver.sequences["b"].pages[0] * driver.pool.page_size] = torch.nan
    rows_N, lengths_N = rows.told()
    with torch.inference_mode():
        found = rows.whole.launch(rows_N, lengths_N, SamplingVariant.GREEDY)
    assert found.token_ids_N.tolist() == [expected[0], -1, expected[2]]
    assert rows.rows.tokens_RM[rows_N, lengths_N].tolist() == [expected[0], 0, expected[2]]
