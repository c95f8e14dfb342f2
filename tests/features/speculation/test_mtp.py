"""A model's own layer for multi-token prediction changes no token, guesses what the definition guesses, and is refused
where there is none."""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from callboard import LLM
from engine.types.errors import PluginError, WeightsError
from tests.engine.test_speculation import GREEDY, PROMPTS, SAMPLED, Said, said, same
from tests.features.speculation.conftest import Guess
from tests.formats.gguf_files import write
from tests.formats.test_gguf_families import FILES
from tests.models.checkpoints import build, save
from tests.models.mtp_heads import ReferenceMTP
from tests.own_cache import use_own_cache
from tests.sampling.borders import clear_of_borders

QUICK = "qwen3-5"
VARIANTS = [QUICK, *(pytest.param(one, marks=pytest.mark.slow) for one in (
    "qwen3-next", "qwen3-5-biases", "qwen3-5-moe", "deepseek-v3", "glm4-moe", "glm4-moe-lite", "deepseek-v32",
    "glm-moe-dsa",
))]  # fmt: skip


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> tuple[ReferenceMTP, Path]:
    reference = ReferenceMTP(QUICK)
    return reference, reference.save(tmp_path_factory.mktemp(QUICK))


@pytest.fixture(scope="module")
def plain(quick: tuple[ReferenceMTP, Path]) -> tuple[Said, Said]:
    """Without it: greedy, then sampled."""
    with engine(quick[1], None) as llm, clear_of_borders():
        return said(llm, PROMPTS, GREEDY), said(llm, PROMPTS, SAMPLED)


def engine(directory: Path, num_tokens: int | None = 4, **tables: dict[str, Any]) -> LLM:
    options = {"proposer.mtp": {"num_tokens": num_tokens}}
    config = {
        "model": {"tokenizer": "none"},
        "device": {"threads": 1},
        "kv": {"num_pages": 128, "page_size": 16},
        "scheduler": {"max_running": 12, "prefill_chunk": 512},
        "plugins": {} if num_tokens is None else {"proposer": "mtp", "options": options},
    }
    return LLM(directory, progress=False, config={name: table | tables.get(name, {}) for name, table in config.items()})


def as_defined(guesses: Sequence[Guess], reference: ReferenceMTP) -> None:
    assert guesses
    for known, guessed in guesses:
        assert guessed == reference.guess(known, len(guessed)), f"behind {len(known)} tokens"


@pytest.mark.parametrize("variant", VARIANTS)
def test_tokens_are_those_without_and_guesses_those_of_the_definition(
    variant: str, tmp_path: Path, guesses: list[Guess]
) -> None:
    reference = ReferenceMTP(variant)
    directory = reference.save(tmp_path / "model")
    with engine(directory, None) as llm, clear_of_borders():
        expected = said(llm, PROMPTS[:6], GREEDY)
    with engine(directory) as llm, clear_of_borders():
        for _ in range(2):  # then with prompts and outputs in the cache
            same(said(llm, PROMPTS[:6], GREEDY), expected)
    as_defined(guesses, reference)


@pytest.mark.parametrize(
    "variant", [QUICK, *(pytest.param(one, marks=pytest.mark.slow) for one in ("glm4-moe", "glm-moe-dsa"))]
)
def test_the_layer_of_a_gguf_file_guesses_the_same(
    variant: str, tmp_path: Path, guesses: list[Guess], monkeypatch: pytest.MonkeyPatch
) -> None:
    use_own_cache(monkeypatch, tmp_path / "cache")
    reference = ReferenceMTP(variant)
    saved = reference.save(tmp_path / "model")
    with engine(saved, None) as llm, clear_of_borders():
        expected = said(llm, PROMPTS[:6], GREEDY)
    write(tmp_path / "tiny.gguf", reference.model, *FILES[variant], saved=saved)
    with engine(tmp_path / "tiny.gguf") as llm, clear_of_borders():
        same(said(llm, PROMPTS[:6], GREEDY), expected)
    as_defined(guesses, reference)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("page_size", "num_tokens", "chunk", "layout"),
    [(4, 4, 512, "layer_first"), (16, 8, 16, "page_first"), (16, 1, 7, "layer_first")],
)
def test_tokens_are_those_without_in_pages_and_chunks_of_all_sizes(
    quick: tuple[ReferenceMTP, Path], plain: tuple[Said, Said], guesses: list[Guess],
    page_size: int, num_tokens: int, chunk: int, layout: str,
) -> None:  # fmt: skip
    tables = {
        "kv": {"page_size": page_size, "num_pages": 2048 // page_size, "layout": layout},
        "scheduler": {"prefill_chunk": chunk},
    }
    with engine(quick[1], num_tokens, **tables) as llm, clear_of_borders():
        for _ in range(2):
            same(said(llm, PROMPTS, GREEDY), plain[0])
            same(said(llm, PROMPTS, SAMPLED), plain[1])
    as_defined(guesses, quick[0])


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2])
def test_over_retractions_both_tiers_and_two_ranks(
    quick: tuple[ReferenceMTP, Path], plain: tuple[Said, Said], guesses: list[Guess], size: int
) -> None:
    few = {"kv": {"num_pages": 30, "page_size": 4, "num_host_pages": 40}, "device": {"tensor_parallel": size}}
    with engine(quick[1], **few) as llm:
        for _ in range(2):
            found = llm.generate(PROMPTS, GREEDY)
            assert [one.token_ids for one in found] == [tokens for tokens, _ in plain[0]]
    as_defined(guesses, quick[0])


@pytest.mark.parametrize("variant", [QUICK, pytest.param("deepseek-v3", marks=pytest.mark.slow)])
def test_a_layer_that_copies_the_model_is_always_right(variant: str, tmp_path: Path, guesses: list[Guess]) -> None:
    reference = ReferenceMTP(variant)
    reference.copy_model()
    with engine(reference.save(tmp_path / "model"), 3) as llm:
        found = llm.generate(PROMPTS[:6], GREEDY)
    assert sum(one.usage.rejected_tokens for one in found) == 0
    assert sum(one.usage.accepted_tokens for one in found) > 6 * 20 // 2


def changed() -> ReferenceMTP:
    """The same model with other weights."""
    reference, generator = ReferenceMTP(QUICK), torch.Generator().manual_seed(3)
    with torch.no_grad():
        for one in (*reference.model.parameters(), *reference.weights.values()):
            one.add_(torch.randn(one.shape, generator=generator) * 0.05)
    return reference


@pytest.mark.slow
def test_after_an_update_the_layer_is_that_of_the_new_weights(
    quick: tuple[ReferenceMTP, Path], tmp_path: Path, guesses: list[Guess]
) -> None:
    (first, path), second = quick, changed()
    other = second.save(tmp_path / "other")
    without = tmp_path / "without"  # as a trainer saves it, and the layer goes on guessing
    shutil.copytree(other, without)
    stored = load_file(without / "model.safetensors")
    save_file({name: one for name, one in stored.items() if not name.startswith("mtp.")}, without / "model.safetensors")
    with engine(path) as llm:
        as_defined_after(llm, guesses, first)
        llm.weights.update(other)
        as_defined_after(llm, guesses, second)
        for tags in (("weights",), ("kv_cache",), ("weights", "kv_cache")):
            llm.weights.release(*tags)
            llm.weights.regain()
            as_defined_after(llm, guesses, second)
        llm.weights.update(path)
        as_defined_after(llm, guesses, first)
        llm.weights.update(other)
        llm.weights.update(load_file(path / "model.safetensors"))
        as_defined_after(llm, guesses, first)
        llm.weights.update(without)
        assert llm.generate(PROMPTS[:6], GREEDY)


def as_defined_after(llm: LLM, guesses: list[Guess], reference: ReferenceMTP) -> None:
    guesses.clear()
    llm.generate(PROMPTS[:6], GREEDY)
    as_defined(guesses, reference)


# ---- what is refused ----------------------------------------------------------------------------


def test_a_family_without_such_a_layer_is_refused(tmp_path: Path) -> None:
    directory = save(build("llama"), tmp_path)
    with pytest.raises(PluginError, match="no layer of LlamaForCausalLM predicts one token further; name another"):
        engine(directory)


def test_files_without_the_layer_are_refused(tmp_path: Path) -> None:
    directory = save(build(QUICK), tmp_path)
    with pytest.raises(PluginError, match=r"its files have no tensors mtp\.\*, which programs"):
        engine(directory)


@pytest.mark.parametrize(
    ("name", "other", "message"),
    [
        ("mtp.fc.weight", None, "'mtp.fc.weight' of shape .* is missing"),
        ("mtp.layers.0.self_attn.q_proj.weight", None, "'mtp.layers.0.self_attn.q_proj.weight' of shape .* is missing"),
        ("mtp.norm.weight", "mtp.norms.weight", "'mtp.norm.weight' of shape .* is missing"),
    ],
)
def test_files_that_lack_a_part_of_it_are_refused(
    quick: tuple[ReferenceMTP, Path], tmp_path: Path, name: str, other: str | None, message: str
) -> None:
    directory, file = tmp_path, "model.safetensors"
    for one in quick[1].iterdir():
        (directory / one.name).write_bytes(one.read_bytes())
    stored = load_file(directory / file)
    tensor = stored.pop(name)
    save_file(stored if other is None else stored | {other: tensor}, directory / file)
    with pytest.raises(WeightsError, match=message):
        engine(directory)


@pytest.mark.slow
def test_a_model_that_another_library_computes_is_refused(tmp_path: Path) -> None:
    directory = ReferenceMTP("glm4-moe").save(tmp_path)
    with pytest.raises(PluginError, match="has another decoder than most families"):
        engine(directory, plugins={"proposer": "mtp", "models": ["transformers"]})
