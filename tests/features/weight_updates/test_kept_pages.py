"""Pages that other features have or are to copy, while weights change and memory is given back."""

from pathlib import Path

import pytest

from callboard import SamplingParams
from engine.features.handover.wish import Wish
from engine.llm import LLM
from tests.features.handover.test_engine import ask, engine, gauges, ids, pair, until_nothing_is_held
from tests.models.checkpoints import build, random_tokens, save

pytestmark = pytest.mark.slow  # engines, and pages that are kept up to a time limit

PARAMS = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
PROMPT = random_tokens(200, seed=1)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(build("qwen3"), tmp_path_factory.mktemp("qwen3"))


def tokens(llm: LLM, prompt: list[int], count: int = 8) -> list[int]:
    return list(llm.generate([prompt], PARAMS.replace(max_tokens=count))[0].token_ids)


def test_no_page_whose_memory_was_given_back_goes_to_the_store(checkpoint: Path, tmp_path: Path) -> None:
    plugins = {"kv_store": "files", "options": {"kv_store.files": {"path": str(tmp_path)}}}
    with engine(checkpoint, {}) as llm:
        longer = PROMPT + tokens(llm, PROMPT, 40) + [3, 4, 5]
        expected = tokens(llm, longer)
    with engine(checkpoint, {"plugins": plugins}) as llm:
        tokens(llm, PROMPT, 40)  # no step has saved its last pages
        llm.weights.release("kv_cache")
        llm.weights.regain("kv_cache")
        tokens(llm, [5, 6, 7])
        assert tokens(llm, longer) == expected


@pytest.mark.parametrize("change", ["update", "release"])
def test_pages_that_are_kept_for_another_engine_outlast_a_change(checkpoint: Path, tmp_path: Path, change: str) -> None:
    with pair(checkpoint, "shared_memory", tmp_path / "rings", timeout_s=0.5) as (p, d):
        expected = tokens(d, PROMPT)
        ask(p, PROMPT, Wish(offer="o", id="o"))
        if change == "update":
            p.weights.update(save(build("qwen3"), tmp_path / "other"))
        else:
            p.weights.release("kv_cache")
            p.weights.regain("kv_cache")
        gauges(p)  # checks the owners of all pages
        assert ids(ask(d, PROMPT, Wish(peer="p", claim="o", id="o"))) == expected
        until_nothing_is_held(p, d)
