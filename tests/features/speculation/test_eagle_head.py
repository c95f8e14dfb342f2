"""An EAGLE-3 head changes no token, guesses what the definition guesses, and is refused where it does not fit."""

import copy
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from callboard import LLM
from engine.features.speculation import head_drafting
from engine.features.speculation.messages import Proposals
from engine.messages import Step
from engine.types.errors import PluginError, WeightsError
from tests.engine.test_speculation import GREEDY, PROMPTS, SAMPLED, Said, said, same
from tests.features.speculation.conftest import Guess
from tests.models.checkpoints import SIZES, build, random_tokens, save
from tests.models.eagle_heads import ReferenceHead, save_head, write_head
from tests.sampling.borders import clear_of_borders

# The token behind a shared page differs: what the head has computed of the page's last position does as well.
BEGINNING = random_tokens(32, 99)
FORKED = [BEGINNING + random_tokens(length, length) for length in (1, 2, 5, 9)]


@pytest.fixture(scope="module")
def model() -> transformers.PreTrainedModel:
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**SIZES, "num_hidden_layers": 4})).eval()


@pytest.fixture(scope="module")
def directory(model: transformers.PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("llama")
    model.save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def head(model: transformers.PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_head(model, tmp_path_factory.mktemp("head"), draft_vocab_size=200)


def engine(directory: Path, head: Path | None, num_tokens: int = 4, **tables: dict[str, Any]) -> LLM:
    options = {"proposer.eagle": {"path": str(head), "num_tokens": num_tokens}}
    config = {
        "model": {"tokenizer": "none"},
        "device": {"threads": 1},
        "kv": {"num_pages": 128, "page_size": 16},
        "scheduler": {"max_running": 12, "prefill_chunk": 512},
        "plugins": {"proposer": "eagle", "options": options} if head is not None else {},
    }
    return LLM(directory, progress=False, config={name: table | tables.get(name, {}) for name, table in config.items()})


def as_defined(guesses: Sequence[Guess], reference: ReferenceHead) -> None:
    assert guesses
    for known, guessed in guesses:
        assert guessed == reference.guess(known, len(guessed)), f"behind {len(known)} tokens"


@pytest.fixture(scope="module")
def plain(directory: Path) -> tuple[Said, Said]:
    """Without a head: greedy, then sampled."""
    with engine(directory, None) as llm, clear_of_borders():
        return said(llm, PROMPTS, GREEDY), said(llm, PROMPTS, SAMPLED)


@pytest.mark.parametrize(
    ("page_size", "num_tokens", "chunk", "batch", "layout"),
    [
        (1, 3, 16, 4, "page_first"),
        (4, 4, 512, 1, "layer_first"),
        pytest.param(16, 8, 512, 12, "layer_first", marks=pytest.mark.slow),
        pytest.param(16, 1, 16, 12, "page_first", marks=pytest.mark.slow),
    ],
)
def test_tokens_are_those_without_and_guesses_those_of_the_definition(
    model: transformers.PreTrainedModel, directory: Path, head: Path, plain: tuple[Said, Said], guesses: list[Guess],
    page_size: int, num_tokens: int, chunk: int, batch: int, layout: str,
) -> None:  # fmt: skip
    tables = {
        "kv": {"page_size": page_size, "num_pages": 2048 // page_size, "layout": layout},
        "scheduler": {"prefill_chunk": chunk, "max_running": batch},
    }
    with engine(directory, head, num_tokens, **tables) as llm, clear_of_borders():
        for _ in range(2):  # then with prompts and outputs in the cache
            same(said(llm, PROMPTS[:batch], GREEDY), plain[0][:batch])
            same(said(llm, PROMPTS[:batch], SAMPLED[:batch]), plain[1][:batch])
    as_defined(guesses, ReferenceHead(model, head))


def test_pages_are_shared_where_the_token_behind_them_is_the_same(
    model: transformers.PreTrainedModel, directory: Path, head: Path, guesses: list[Guess]
) -> None:
    with engine(directory, head) as llm:
        found = [llm.generate([prompt], GREEDY)[0] for prompt in (*FORKED, FORKED[3])]
    as_defined(guesses, ReferenceHead(model, head))
    assert [one.usage.cached_tokens for one in found] == [0, 16, 16, 16, 32]


@pytest.mark.slow
def test_guesses_are_those_of_the_definition_over_retractions_and_both_tiers(
    model: transformers.PreTrainedModel, directory: Path, head: Path, plain: tuple[Said, Said], guesses: list[Guess]
) -> None:
    """Few pages, so that rows lose theirs, and find them again on the host, and the states that belong to them."""
    few = {"kv": {"num_pages": 30, "page_size": 4, "num_host_pages": 40}}
    with engine(directory, head, **few) as llm:
        for _ in range(2):
            found = llm.generate(PROMPTS, GREEDY)
            assert [one.token_ids for one in found] == [tokens for tokens, _ in plain[0]]
    as_defined(guesses, ReferenceHead(model, head))


@pytest.mark.slow
def test_a_head_of_a_model_with_recurrent_layers(tmp_path: Path, guesses: list[Guess]) -> None:
    """A wrong token leaves the states of the model, and what the head reads of a row is that of its right tokens."""
    hybrid = build("qwen3-5")
    directory = save(hybrid, tmp_path / "model")
    own = save_head(hybrid, tmp_path / "head", eagle_aux_hidden_state_layer_ids=[0, 1, 2])
    with engine(directory, None) as llm, clear_of_borders():
        expected = said(llm, PROMPTS, GREEDY)
    with engine(directory, own) as llm, clear_of_borders():
        for _ in range(2):
            same(said(llm, PROMPTS, GREEDY), expected)
    as_defined(guesses, ReferenceHead(hybrid, own))


@pytest.mark.slow
def test_two_ranks_guess_the_same(
    model: transformers.PreTrainedModel, directory: Path, head: Path, plain: tuple[Said, Said], guesses: list[Guess]
) -> None:
    with engine(directory, head, device={"tensor_parallel": 2}) as llm:
        found = llm.generate(PROMPTS, GREEDY)
    assert [one.token_ids for one in found] == [tokens for tokens, _ in plain[0]]
    as_defined(guesses, ReferenceHead(model, head))


@pytest.mark.slow
def test_executors_that_crash_come_back_with_their_head(
    model: transformers.PreTrainedModel, directory: Path, head: Path, plain: tuple[Said, Said], guesses: list[Guess],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    draft, steps = head_drafting.HeadDrafter.draft, []

    def failing(self: head_drafting.HeadDrafter, step: Step, proposals: Proposals) -> object:
        steps.append(step)
        if len(steps) == 6:
            raise RuntimeError("lost")
        return draft(self, step, proposals)

    monkeypatch.setattr(head_drafting.HeadDrafter, "draft", failing)
    with engine(directory, head) as llm:
        found = llm.generate(PROMPTS, GREEDY)
    assert [one.token_ids for one in found] == [tokens for tokens, _ in plain[0]]
    as_defined(guesses, ReferenceHead(model, head))


@pytest.mark.slow
def test_other_settings_of_a_head(
    model: transformers.PreTrainedModel, directory: Path, tmp_path: Path, guesses: list[Guess]
) -> None:
    """All tokens, as vLLM writes the layers and as SGLang does, the residual behind the norm."""
    normed = save_head(model, tmp_path / "normed", norm_before_residual=True)
    layers = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}}
    nested = save_head(model, tmp_path / "nested", norm_before_residual=True, **layers)
    config = json.loads((nested / "config.json").read_text())
    del config["eagle_aux_hidden_state_layer_ids"]
    (nested / "config.json").write_text(json.dumps(config))
    for one in (normed, nested):
        with engine(directory, one) as llm:
            llm.generate(PROMPTS[:4], GREEDY)
        as_defined(guesses, ReferenceHead(model, normed))
        guesses.clear()


@pytest.mark.slow
def test_a_head_that_has_learnt_the_model_is_right(
    model: transformers.PreTrainedModel, directory: Path, head: Path, plain: tuple[Said, Said], tmp_path: Path,
    guesses: list[Guess],
) -> None:  # fmt: skip
    """The head reads the states of the model, not those of a head before it."""
    texts = [[*prompt, *tokens] for prompt, (tokens, _) in zip(PROMPTS, plain[0], strict=True)]
    trained = train(ReferenceHead(model, head), texts)
    config = json.loads((head / "config.json").read_text())
    learnt = write_head(trained, tmp_path / "learnt", {**config, "draft_vocab_size": SIZES["vocab_size"]})
    with engine(directory, learnt, num_tokens=2) as llm:
        found = llm.generate(PROMPTS, GREEDY)
    assert [one.token_ids for one in found] == [tokens for tokens, _ in plain[0]]
    accepted = sum(one.usage.accepted_tokens for one in found)
    # A second guess attends to keys of the model's states, and in training to those of the head's own: some are wrong.
    assert accepted > 2 * sum(one.usage.rejected_tokens for one in found)


MOST_STEPS = 600
KNOWN = 0.03  # nats, summed over the texts and the three passes


def train(reference: ReferenceHead, texts: list[list[int]]) -> dict[str, Tensor]:
    """Weights with which the head, fed with the model's states and then with its own, knows these texts by heart.

    The last bits of a product differ between processors, and so do all weights after some steps of training.  So it
    trains until the texts are known, and not for a number of steps."""
    vocab, width = SIZES["vocab_size"], SIZES["hidden_size"]
    weights = dict(reference.w) | {"lm_head.weight": torch.randn(vocab, width) * 0.1}
    del weights["d2t"], weights["t2d"]
    for name, one in weights.items():
        weights[name] = one.clone().requires_grad_(name != "fc.weight")
    states = [reference.states(text) for text in texts]
    reference.w = weights
    optimiser = torch.optim.Adam([one for one in weights.values() if one.requires_grad], lr=0.01)
    for _ in range(MOST_STEPS):
        loss = torch.zeros(())
        for text, own in zip(texts, states, strict=True):
            tokens, now = torch.tensor(text), own
            for nth in range(3):  # positions whose state is the model's, then the head's own
                length = len(tokens) - 2 - nth
                x = reference.run(tokens[1 + nth : 1 + nth + length], now[:length])
                loss = loss + torch.nn.functional.cross_entropy(reference.logits(x), tokens[2 + nth :])
                now = x
        if loss.detach() < KNOWN:
            break
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return {name: one.detach() for name, one in weights.items()}


# ---- what is refused ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"vocab_size": 300, "draft_vocab_size": 200}, PluginError, "vocab_size is 300, expected the model's 259"),
        ({"hidden_size": 32}, PluginError, "hidden_size is 32, expected the model's 64"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 2, 7]}, PluginError, r"layers \[1, 2, 7\], and the model has 4"),
        ({"eagle_aux_hidden_state_layer_ids": [2, 1]}, WeightsError, r"\[2, 1\], expected layers in ascending order"),
        ({"architectures": ["LlamaForCausalLM"]}, WeightsError, "expected LlamaForCausalLMEagle3"),
        ({"num_hidden_layers": 2}, WeightsError, "num_hidden_layers is 2, expected 1"),
        ({"draft_vocab_size": 199}, WeightsError, r"lm_head.weight.*\[200, 64\], config.json expects \[199, 64\]"),
    ],
)
def test_heads_that_do_not_fit_are_refused(
    model: transformers.PreTrainedModel, directory: Path, tmp_path: Path, fields: dict[str, Any],
    error: type[Exception], message: str,
) -> None:  # fmt: skip
    other = save_head(model, tmp_path / "head", **{"draft_vocab_size": 200})
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | fields))
    with pytest.raises(error, match=message):
        engine(directory, other)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda one: one.pop("d2t"), "'d2t' is missing from the weights: the head has 200 of 259 tokens"),
        (lambda one: one.update(d2t=one["d2t"][1:]), r"'d2t' is \[199\] of int64, expected \[200\] of integers"),
        (lambda one: one.update(d2t=one["d2t"] + 99), "leads beyond the model's tokens, which are 0 to 258"),
        (lambda one: one.update(more=torch.zeros(2)), "'more' has no place in LlamaForCausalLMEagle3"),
        (lambda one: one.pop("fc.weight"), "'fc.weight' of shape .* is missing"),
    ],
)
def test_files_of_heads_that_lack_something_are_refused(
    model: transformers.PreTrainedModel, directory: Path, head: Path, tmp_path: Path,
    change: Callable[[dict[str, Tensor]], object], message: str,
) -> None:  # fmt: skip
    tensors = dict(ReferenceHead(model, head).w)
    change(tensors)
    other = write_head(tensors, tmp_path / "head", json.loads((head / "config.json").read_text()))
    with pytest.raises(WeightsError, match=message):
        engine(directory, other)


def test_pages_from_a_store_have_no_states(directory: Path, head: Path, tmp_path: Path) -> None:
    options = {"proposer.eagle": {"path": str(head)}, "kv_store.files": {"path": str(tmp_path)}}
    with pytest.raises(PluginError, match=r"plugins\.kv_store=files does not keep .*; set it to 'none'"):
        engine(directory, head, plugins={"proposer": "eagle", "kv_store": "files", "options": options})


def test_a_model_that_another_library_computes_has_no_states(directory: Path, head: Path) -> None:
    options = {"proposer.eagle": {"path": str(head)}}
    with pytest.raises(PluginError, match="LlamaForCausalLM has another decoder than most families"):
        engine(directory, head, plugins={"proposer": "eagle", "models": ["transformers"], "options": options})


def test_drafting_that_finds_no_room_is_left_out(
    directory: Path, head: Path, plain: tuple[Said, Said], guesses: list[Guess], monkeypatch: pytest.MonkeyPatch
) -> None:
    passes, run = [], head_drafting.HeadDrafter._pass

    def failing(self: head_drafting.HeadDrafter, step: Step) -> None:
        passes.append(step)
        if len(passes) in (2, 9):
            raise torch.OutOfMemoryError("full")
        if len(passes) == 12:
            raise MemoryError("of a kernel in C")
        if len(passes) == 14:
            raise RuntimeError("[enforce fail at alloc_cpu.cpp:127] . DefaultCPUAllocator: can't allocate memory")
        run(self, step)

    monkeypatch.setattr(head_drafting.HeadDrafter, "_pass", failing)
    with engine(directory, head) as llm:
        found = llm.generate(PROMPTS, GREEDY)
        assert llm._system.executors.num_restarts == 0
    assert [one.token_ids for one in found] == [tokens for tokens, _ in plain[0]]
    assert len(passes) > 20


def test_after_an_update_guesses_are_made_with_the_new_embedding(
    model: transformers.PreTrainedModel, directory: Path, head: Path, guesses: list[Guess], tmp_path: Path
) -> None:
    changed = copy.deepcopy(model)
    with torch.no_grad():
        generator = torch.Generator().manual_seed(1)
        for parameter in changed.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    changed.save_pretrained(tmp_path)
    with engine(directory, head) as llm:
        llm.generate(PROMPTS[:2], GREEDY)
        as_defined(guesses, ReferenceHead(model, head))
        guesses.clear()
        llm.weights.update(tmp_path)
        llm.generate(PROMPTS[:2], GREEDY)
    as_defined(guesses, ReferenceHead(changed, head))
