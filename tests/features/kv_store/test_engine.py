"""The whole engine with pages in files: what was computed once is found, also after a restart, and no token changes."""

from pathlib import Path

import pytest

from callboard import LLM, SamplingParams
from engine.kernels.panels import products
from tests.models.checkpoints import build, random_tokens, save

PARAMS = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
PROMPTS = [random_tokens(70, seed=seed) for seed in range(6)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(build("qwen3"), tmp_path_factory.mktemp("qwen3"))


def serve(checkpoint: Path, store: Path | None, **more: dict[str, object]) -> tuple[list[list[int]], list[int]]:
    """A pool for two of the prompts at a time.  Every prompt's output, twice, and its cached tokens."""
    config = {"kv": {"page_size": 16, "num_pages": 10}, "model": {"dtype": "float32", "tokenizer": "none"}}
    if store is not None:
        config["plugins"] = {"kv_store": "files", "options": {"kv_store.files": {"path": str(store)}}}
    outputs, cached = [], []
    with LLM(checkpoint, progress=False, config=config | more) as llm:
        for prompt in PROMPTS * 2:
            (completion,) = llm.generate([prompt], PARAMS)
            outputs.append(completion.token_ids)
            cached.append(completion.usage.cached_tokens)
    return outputs, cached


def test_the_layout_changes_no_token_and_both_find_the_same_files(checkpoint: Path, tmp_path: Path) -> None:
    kv = {"page_size": 16, "num_pages": 10, "num_host_pages": 12}
    expected, _ = serve(checkpoint, tmp_path, kv=kv)
    outputs, cached = serve(checkpoint, tmp_path, kv=kv | {"layout": "page_first"})
    assert outputs == expected
    assert cached == [64] * 12


def test_what_was_computed_is_found_again_after_a_restart_too(checkpoint: Path, tmp_path: Path) -> None:
    expected, without = serve(checkpoint, None)
    assert sum(without) == 0, "a prompt has gone from the pool when its next turn comes"
    first, found = serve(checkpoint, tmp_path)
    again, from_the_start = serve(checkpoint, tmp_path)
    assert first == again == expected
    assert found == [0] * 6 + [64] * 6
    assert from_the_start == [64] * 12


@pytest.mark.slow
def test_two_ranks_find_their_own_halves(checkpoint: Path, tmp_path: Path) -> None:
    expected, _ = serve(checkpoint, tmp_path / "alone")
    two = {"device": {"tensor_parallel": 2, "kind": "cpu"}}
    first, found = serve(checkpoint, tmp_path / "alone", **two)
    assert first == expected
    assert found == [0] * 6 + [64] * 6, "what one rank alone has stored is of no use to two"
    _, from_the_start = serve(checkpoint, tmp_path / "alone", **two)
    assert from_the_start == [64] * 12


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(
            {"quantization": "int8"},
            marks=pytest.mark.skipif(products() is None, reason="there is no C compiler, or no AVX2"),
        ),
        {"numerics": "invariant"},
    ],
    ids=["weights", "numerics"],
)
def test_pages_of_other_weights_or_numerics_are_not_taken(
    checkpoint: Path, tmp_path: Path, other: dict[str, str]
) -> None:
    serve(checkpoint, tmp_path)
    model = {"dtype": "float32", "tokenizer": "none", **other}
    assert serve(checkpoint, tmp_path, model=model)[1] == [0] * 6 + [64] * 6


def test_invariant_pages_of_another_kernel_are_not_taken(checkpoint: Path, tmp_path: Path) -> None:
    """They may differ in a bit, and a prompt that was cached must have those of one that was not."""
    model = {"dtype": "float32", "tokenizer": "none", "numerics": "invariant"}
    plugins = {"kv_store": "files", "options": {"kv_store.files": {"path": str(tmp_path)}}, "linear": "onednn"}
    serve(checkpoint, tmp_path, model=model)
    assert serve(checkpoint, tmp_path, model=model)[1] == [64] * 12
    assert serve(checkpoint, tmp_path, model=model, plugins=plugins)[1] == [0] * 6 + [64] * 6


def test_damaged_files_change_no_token(checkpoint: Path, tmp_path: Path) -> None:
    expected, _ = serve(checkpoint, tmp_path)
    for number, path in enumerate(sorted(tmp_path.glob("??/*"))):
        content = bytearray(path.read_bytes())
        content[len(content) * (number % 7) // 7] ^= 1
        path.write_bytes(content[: len(content) // 2] if number % 2 else content)
    outputs, cached = serve(checkpoint, tmp_path)
    assert outputs == expected
    assert sum(cached[:6]) == 0, "each page is damaged"
    assert all(cached[6:]), "each prompt's first page was found to be, and replaced"
