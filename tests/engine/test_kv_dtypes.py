"""The whole engine over pages of fewer bits: they are cached, moved and shared like any other, and no token changes."""

from pathlib import Path

import pytest

from callboard import LLM, SamplingParams
from engine.types.errors import PluginError
from tests.features.kv_store.test_engine import serve
from tests.models.checkpoints import build, random_tokens, save

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
PROMPTS = [random_tokens(length, seed) for seed, length in enumerate((3, 40, 70, 90))]
MODEL = {"dtype": "float32", "tokenizer": "none"}
KV = {"page_size": 16, "num_pages": 10}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(build("qwen3"), tmp_path_factory.mktemp("qwen3"))


def outputs(checkpoint: Path, **config: dict[str, object]) -> list[list[int]]:
    """Of each prompt, asked for alone, and again behind the others."""
    with LLM(checkpoint, progress=False, config={"model": MODEL, **config}) as llm:
        return [one.token_ids for prompt in PROMPTS * 2 for one in llm.generate([prompt], GREEDY)]


@pytest.mark.slow
def test_int8_pages_come_back_from_the_host_split_over_ranks_and_in_chunks(checkpoint: Path) -> None:
    """Twelve pages are too few for all prompts: they go to the host and come back."""
    expected = outputs(checkpoint, kv={"dtype": "int8"})
    assert outputs(checkpoint, kv={**KV, "dtype": "int8", "num_host_pages": 24}) == expected
    two_ranks = {"tensor_parallel": 2, "kind": "cpu"}
    chunks = {"prefill_chunk": 32, "max_step_tokens": 33}
    assert outputs(checkpoint, kv={"dtype": "int8"}, device=two_ranks, scheduler=chunks) == expected


def test_a_store_gives_pages_to_those_of_the_same_type_alone(checkpoint: Path, tmp_path: Path) -> None:
    kv = {dtype: {"kv": {**KV, "dtype": dtype}} for dtype in ("bfloat16", "float16")}
    expected, found = serve(checkpoint, tmp_path, **kv["bfloat16"])
    assert found == [0] * 6 + [64] * 6
    assert serve(checkpoint, tmp_path, **kv["float16"])[1] == [0] * 6 + [64] * 6, "as many bytes, other numbers"
    assert serve(checkpoint, tmp_path, **kv["bfloat16"]) == (expected, [64] * 12)


@pytest.mark.parametrize(("dtype", "share"), [("bfloat16", 0.8), ("int8", 0.8), ("fp8_e4m3", 0.6)])
def test_most_tokens_are_those_of_exact_pages(dtype: str, share: float, exact: list[list[int]]) -> None:
    found = continued({"dtype": dtype})
    agreeing = sum(
        next((at for at, (one, other) in enumerate(zip(*pair, strict=True)) if one != other), len(pair[0]))
        for pair in zip(found, exact, strict=True)
    )
    assert agreeing >= share * sum(map(len, exact))


@pytest.fixture(scope="module")
def exact() -> list[list[int]]:
    return continued({})


def continued(kv: dict[str, object]) -> list[list[int]]:
    """What the demo model goes on with."""
    prompts = ["def add(a, b):\n", "class Stack:\n    def ", "import os\n\n", "for i in range(10):\n    ", "The"]
    with LLM(progress=False, config={"kv": {"num_pages": 64, **kv}, "device": {"kind": "cpu"}}) as llm:
        return [one.token_ids for one in llm.generate(prompts, GREEDY.replace(max_tokens=24))]


def test_a_backend_that_reads_no_such_pages_is_refused_before_weights_are_read(checkpoint: Path) -> None:
    config = {"model": {**MODEL, "load_format": "dummy"}, "kv": {"dtype": "int8"}, "plugins": {"attention": "triton"}}
    with pytest.raises(PluginError, match=r"kv\.dtype int8, it takes float32.*can run here: torch"):
        LLM(checkpoint, progress=False, config=config)
