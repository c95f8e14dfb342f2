"""A draft model changes no token, whatever it says and whatever it lacks; and it says what it should."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from callboard import LLM
from engine.execution.rows import DeviceRows
from engine.features.speculation import drafting, rank
from engine.features.speculation.drafting import Drafter
from engine.features.speculation.messages import Proposals, proposals_of
from engine.features.speculation.payoff import Payoff
from engine.messages import Admission, Step
from engine.types.errors import PluginError, WeightsError
from engine.types.params import SamplingParams as Params
from server.extensions.chaos.sim.liars import Everything
from server.extensions.verify.verify import Way, verify_numerics
from tests.engine.test_invariance import BASE, BY_NAME
from tests.engine.test_speculation import GREEDY, PROMPTS, SAMPLED, Said, said, same
from tests.models.checkpoints import build, save
from tests.sampling.borders import clear_of_borders


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(build("llama"), tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of another family and shape with the same tokens: its drafts are right by chance."""
    return save(build("qwen2"), tmp_path_factory.mktemp("qwen2"))


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever it costs, everything that fits is drafted."""
    monkeypatch.setattr(Payoff, "counts", Everything.counts)
    monkeypatch.setattr(Payoff, "knows", Everything.knows)


def engine(directory: Path, draft: Path | None, num_tokens: int = 4, **tables: dict[str, Any]) -> LLM:
    options = {"proposer.draft_model": {"path": str(draft), "num_tokens": num_tokens}}
    config = {
        "model": {"tokenizer": "none"},
        "device": {"threads": 1},
        "kv": {"num_pages": 128, "page_size": 16},
        "scheduler": {"max_running": 12, "prefill_chunk": 512},
        "plugins": {"proposer": "draft_model", "options": options} if draft is not None else {},
    }
    return LLM(directory, progress=False, config={name: table | tables.get(name, {}) for name, table in config.items()})


@pytest.fixture(scope="module")
def plain(directory: Path) -> tuple[Said, Said]:
    """Without a draft: greedy, then sampled."""
    with engine(directory, None) as llm, clear_of_borders():
        return said(llm, PROMPTS, GREEDY), said(llm, PROMPTS, SAMPLED)


@pytest.mark.parametrize(
    ("is_itself", "page_size", "num_tokens", "chunk", "batch"),
    [(True, 16, 8, 512, 12), (True, 1, 3, 16, 4), (False, 16, 1, 16, 12), (False, 1, 8, 512, 1)],
)
@pytest.mark.usefixtures("always")
def test_tokens_are_those_without(
    directory: Path, stranger: Path, plain: tuple[Said, Said], is_itself: bool, page_size: int, num_tokens: int,
    chunk: int, batch: int,
) -> None:  # fmt: skip
    tables = {
        "kv": {"page_size": page_size, "num_pages": 2048 // page_size},
        "scheduler": {"prefill_chunk": chunk, "max_running": batch},
    }
    accepted = rejected = 0
    with engine(directory, directory if is_itself else stranger, num_tokens, **tables) as llm, clear_of_borders():
        for _ in range(2):  # then with prompts and outputs in the cache
            same(said(llm, PROMPTS[:batch], GREEDY), plain[0][:batch])
            same(said(llm, PROMPTS[:batch], SAMPLED[:batch]), plain[1][:batch])
        for one in llm.generate(PROMPTS[:batch], GREEDY):
            accepted += one.usage.accepted_tokens
            rejected += one.usage.rejected_tokens
    if is_itself:
        assert rejected == 0
        assert accepted >= (len(PROMPTS[:batch]) * GREEDY.max_tokens * num_tokens // (num_tokens + 1)) * 3 // 4
    else:
        assert rejected > 4 * accepted


@pytest.mark.slow
@pytest.mark.usefixtures("always")
def test_a_model_that_drafts_for_itself_is_always_right_over_retractions_ranks_and_both_tiers(
    directory: Path, plain: tuple[Said, Said]
) -> None:
    """Few pages, so that rows lose theirs, and find them again on the host, where the draft model's are not."""
    few = {"kv": {"num_pages": 30, "page_size": 4, "num_host_pages": 40}, "device": {"tensor_parallel": 2}}
    with engine(directory, directory, **few) as llm:
        found = llm.generate(PROMPTS, GREEDY)
    assert [one.token_ids for one in found] == [tokens for tokens, _ in plain[0]]
    assert sum(one.usage.rejected_tokens for one in found) == 0
    assert sum(one.usage.accepted_tokens for one in found) > 100


@pytest.mark.usefixtures("always")
def test_a_draft_that_is_a_position_off_is_seen(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests above rely on this: drafting for itself is right only if everything is in its place."""
    read = Drafter._read

    def shifted(self: Drafter, step_id: int, rows: np.ndarray, ends: np.ndarray) -> np.ndarray:
        self._rows.computed[rows] = ends - 1  # as if the prompt had been read
        return read(self, step_id, rows, ends)

    monkeypatch.setattr(Drafter, "_read", shifted)
    with engine(directory, directory) as llm:
        found = llm.generate(PROMPTS, GREEDY)
    assert sum(one.usage.rejected_tokens for one in found) > 20


@pytest.mark.usefixtures("always")
def test_executors_that_crash_come_back_with_their_draft_model(
    directory: Path, plain: tuple[Said, Said], monkeypatch: pytest.MonkeyPatch
) -> None:
    apply, steps = rank.DraftRank.apply, []

    def failing(self: rank.DraftRank, step: Step) -> Step:
        steps.append(step)
        if len(steps) == 6:
            raise RuntimeError("lost")
        return apply(self, step)

    monkeypatch.setattr(rank.DraftRank, "apply", failing)
    with engine(directory, directory) as llm:
        found = llm.generate(PROMPTS, GREEDY)
    assert [one.token_ids for one in found] == [tokens for tokens, _ in plain[0]]
    assert sum(one.usage.rejected_tokens for one in found) == 0


@pytest.mark.usefixtures("always")
def test_bits_are_the_same() -> None:
    drafting = {"proposer": "draft_model", "options": {"proposer.draft_model": {"path": "demo"}}}
    verify_numerics(BASE, [BY_NAME["alone"], Way("with a draft model", {"plugins": drafting})], number=4)


# ---- what is refused ----------------------------------------------------------------------------


def edited(directory: Path, to: Path, **fields: object) -> Path:
    to.mkdir()
    for path in directory.iterdir():
        if path.name != "config.json":
            (to / path.name).symlink_to(path)
    config = json.loads((directory / "config.json").read_text())
    (to / "config.json").write_text(json.dumps(config | fields))
    return to


def test_who_cannot_draft_is_refused_by_name(directory: Path, tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=r"nowhere.*no such directory"):
        engine(directory, Path("./nowhere/at/all"))
    with pytest.raises(PluginError, match=r"cannot draft for .*it has 300 tokens, expected 259"):
        engine(directory, edited(directory, tmp_path / "more", vocab_size=300))
    pooling = edited(directory, tmp_path / "labels", architectures=["LlamaForSequenceClassification"])
    with pytest.raises(PluginError, match="name a model that generates text"):
        engine(directory, pooling)
    for variant in ("qwen3-5", "granite4-hybrid", "lfm2"):
        recurrent = save(build(variant), tmp_path / variant)
        with pytest.raises(
            PluginError, match=r"cannot draft for .*recurrent layers, whose states .*name another model"
        ):
            engine(directory, recurrent)
    with pytest.raises(PluginError, match=r"proposer.draft_model.*path"):
        engine(directory, None, plugins={"proposer": "draft_model"})


def test_another_tokenizer_is_refused_with_the_first_token_that_differs(tmp_path: Path) -> None:
    demo = Path(__file__).parents[3] / "examples" / "demo_model"
    other = edited(demo, tmp_path / "other")
    (other / "tokenizer.json").unlink()
    tokenizer = json.loads((demo / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    (first, at), (second, there) = sorted(vocab.items(), key=lambda item: item[1])[300:302]
    vocab[first], vocab[second] = there, at
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(PluginError, match=rf"its token {at} is .*, expected .*same tokenizer"):
        engine(demo, other, model={"tokenizer": ""})


# ---- what the draft model has computed ----------------------------------------------------------


class Counting(Drafter):
    """Passes are only counted: what they would have computed, as tokens of each row."""

    def __init__(self, rows: DeviceRows) -> None:
        class Pool:
            page_stride, page_size, num_pages = 4, 4, 16

        super().__init__(None, Pool(), None, rows, vocab_size=9, num_tokens=2, most_tokens=8)  # type: ignore[arg-type]
        self.passes: list[Step] = []

    def _pass(self, step: Step) -> None:
        drafting.lay_out(step, self._rows.computed)
        self.passes.append(step)

    def lengths(self) -> list[int]:
        """Lengths in the first pass since the last call: prompts that are read, then those with one token."""
        step, *_ = self.passes
        self.passes.clear()
        return [*np.frombuffer(step.prefill_lengths, np.int32).tolist(), *[1] * (len(step.decode_rows) // 4)]


def int32(*numbers: int) -> bytes:
    return np.array(numbers, dtype=np.int32).tobytes()


def asking(row: int, known: int, step_id: int = 9, **fields: Any) -> Step:
    """A step that verifies two tokens behind ``known`` ones."""
    proposals = Proposals(rows=int32(row, row), positions=int32(known, known + 1), tokens=int32(-1, -1))
    return Step(
        step_id=step_id, prefill_rows=int32(row), prefill_starts=int32(known - 1), prefill_lengths=int32(3),
        prefill_samples=int32(3), parts=proposals.part(), **fields,
    )  # fmt: skip


def admitted(row: int, num_tokens: int, num_computed: int, *pages: int, **fields: Any) -> Step:
    tokens = np.zeros(num_tokens, np.int32).tobytes()
    return Step(
        step_id=1,
        admissions=(
            Admission(
                row=row,
                token_ids=tokens,
                num_prompt_tokens=num_tokens,
                num_computed_tokens=num_computed,
                pages=int32(*pages),
                params=Params(),
            ),
        ),
        **fields,
    )


def test_only_what_is_lacking_is_computed() -> None:
    rows = DeviceRows(4, 64, 4, rows_device())
    drafter, computed = Counting(rows), rows.computed

    def ask(row: int, known: int, **fields: Any) -> list[int]:
        step = asking(row, known, **fields)
        drafter.follow(step, computed)
        drafter.draft(step, proposals_of(step))
        return drafter.lengths()

    drafter.follow(admitted(0, 6, 0, 0, 1, 2), computed)
    computed[0] = 6
    assert ask(0, 7) == [7]  # the prompt, and the token behind it
    assert ask(0, 8) == [1]  # nothing of the draft was right: a token came
    assert ask(0, 11) == [2]  # all was right: the last one that was drafted, and the one behind it
    computed[0] = 11
    # A row that shares two pages finds their keys and values; a page that came back from the host has nothing.
    drafter.follow(admitted(1, 9, 8, 0, 1, 3), computed)
    assert ask(1, 10) == [2]
    back = {"filled_pages": int32(1)}
    drafter.follow(admitted(2, 9, 8, 0, 1, 4, **back), computed)
    assert ask(2, 10) == [6]
    drafter.follow(admitted(3, 9, 8, 0, 1, 5, filled_pages=int32(0)), computed)
    assert ask(3, 10) == [8]  # as much as fits a pass; nothing is drafted yet
    assert ask(3, 10) == [2]
    # A new page under an old number, and a page that takes the place of another one.
    computed[3] = 12
    drafter.follow(Step(step_id=2, table_rows=int32(3), table_indexes=int32(3), table_pages=int32(4)), computed)
    drafter.follow(Step(step_id=3, table_rows=int32(3), table_indexes=int32(1), table_pages=int32(9)), computed)
    assert ask(3, 13) == [8]


def rows_device() -> Any:
    import torch

    return torch.device("cpu")
