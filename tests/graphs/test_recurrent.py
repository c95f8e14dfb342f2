"""Captured steps of models with recurrent layers: the tokens and states of steps without graphs."""

from typing import Any

import pytest
import torch

from callboard import LLM
from tests.graphs.engines import install
from tests.graphs.runners import GREEDY, OpenRunner, Steps, load, tokens
from tests.models.checkpoints import build, random_tokens, save

# One of each kind of layer, and one beside attention.
KINDS = {"lfm2": "decode", "qwen3-5": "breakable", "granite4-hybrid": "decode", "falcon-h1": "breakable"}
ROWS = 8


@pytest.fixture(
    scope="module", params=[pytest.param(kind, marks=[pytest.mark.slow] * (kind != "qwen3-5")) for kind in KINDS]
)
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[OpenRunner, OpenRunner]:
    """A runner with graphs, and one without."""
    checkpoint = save(build(request.param), tmp_path_factory.mktemp(request.param))
    with pytest.MonkeyPatch.context() as patch:
        install(patch)
        captured = load(checkpoint, KINDS[request.param], max_running=ROWS)
    return captured, load(checkpoint, "off", max_running=ROWS)


def test_rows_in_any_order_and_number_get_the_tokens_of_a_plain_runner(both: tuple[OpenRunner, OpenRunner]) -> None:
    assert both[0].parts.whole_decodes.captured == (1, 2, 3, 4, 6, 8)
    replays = both[0].parts.graphs.replays
    pairs = [Steps(one) for one in both]

    def compare(name: str, *arguments: int) -> None:
        found, expected = (tokens(getattr(steps, name)(*arguments)) for steps in pairs)
        assert found == expected, (name, arguments)

    for row in range(ROWS):
        num_replays = len(replays)
        compare("prefill", row, 3 + 2 * row)
        assert both[0].parts.piecewise is None or len(replays) > num_replays + 3, "between the recurrent parts"
    for rows in ((0, 1, 2), (7, 3, 1, 0, 5), (2,), (6, 4), tuple(range(ROWS)), (5, 4, 3, 2, 1)):
        for _ in range(3):
            compare("decode", *rows)
    compare("prefill", 3, 9)  # another sequence in a slot that has been used
    for _ in range(3):
        compare("decode", 3, 0, 6, 7, 1)


def test_a_step_changes_the_states_of_its_rows_and_of_the_slot_for_padding(
    both: tuple[OpenRunner, OpenRunner],
) -> None:
    captured, plain = both
    states: torch.Tensor = captured.parts.states.data
    assert len(states) == ROWS + 1
    assert len(plain.parts.states.data) == ROWS
    steps = Steps(captured)
    for row in range(ROWS):
        steps.prefill(row, 3 + row)
        assert states[:row].isfinite().all()
    for rows in ((1, 0, 2, 7, 4), (3,)):
        steps.decode(*rows)
        before = states.clone()
        steps.decode(*rows)
        changed = (states != before).any(1).nonzero().flatten().tolist()
        assert set(changed) - {ROWS} == set(rows)


@pytest.mark.slow
def test_an_engine_with_graphs_gives_the_tokens_of_one_without_also_from_cached_states(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(build("qwen3-5"), tmp_path)
    prompts = [random_tokens(length, seed) for seed, length in enumerate((1, 5, 16, 17, 40, 40))]
    prompts[-1] = prompts[-2][:24] + prompts[-1][24:]
    params = GREEDY.replace(max_tokens=20)
    found, devices = [], install(monkeypatch)
    for mode in ("breakable", "off"):
        tables = {
            "kv": {"page_size": 4, "num_pages": 200},
            "scheduler": {"prefill_chunk": 16, "max_step_tokens": 24, "max_running": 5},
            "model": {"dtype": "float32", "tokenizer": "none", "max_model_len": 64},
            "graphs": {"mode": mode},
            "plugins": {"attention": "torch"},
        }
        with LLM(tmp_path, progress=False, config=tables) as llm:
            outputs = [llm.generate(prompts, params) for _ in range(2)]
            assert sum(one.usage.cached_tokens for one in outputs[1]) > 0
            found.append([[one.token_ids for one in some] for some in outputs])
    assert found[0] == found[1]
    assert len(devices[0].replays) > 20
