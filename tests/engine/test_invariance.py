"""The same bits whatever else runs: one digest for mixed requests in many ways, and ``callboard verify numerics``."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from engine.config import Config, build_config
from engine.kernels.panels import products
from engine.llm import Completion
from engine.messages import Usage
from engine.types.errors import CallboardError, ConfigError
from server.extensions.verify import verify
from server.extensions.verify.verify import WAYS, Request, Way, mixed_requests, verify_numerics

DEMO = Path(__file__).parents[2] / "examples" / "demo_model"
BASE = build_config(
    Config(),
    {
        "model": {"path": str(DEMO)},
        "device": {"threads": 1},
        "scheduler": {"max_step_tokens": 256, "prefill_chunk": 256},
        "kv": {"num_pages": 512},
    },
)
BY_NAME = {way.name: way for way in WAYS}


def test_the_same_bits_alone_in_chunks_cached_retracted_and_restored() -> None:
    names = ("alone", "in chunks of 32", "pages back from the host")
    verify_numerics(BASE, [BY_NAME[name] for name in names], number=10)


@pytest.mark.slow
def test_the_same_bits_from_a_process_that_was_killed() -> None:
    killed = replace(BY_NAME["in a process, killed and recomputed"], kills=1)
    verify_numerics(BASE, [BY_NAME["together"], killed], number=3)


@pytest.mark.slow
@pytest.mark.skipif(products() is None, reason="there is no C compiler, or no AVX2, for weights in int8")
def test_the_same_bits_in_int8() -> None:
    rounded = build_config(BASE, {"model": {"quantization": "int8"}})
    verify_numerics(rounded, [BY_NAME["together"], BY_NAME["in chunks of 32"], BY_NAME["over 2 ranks"]], number=4)


@pytest.mark.slow
def test_the_same_bits_over_any_number_of_ranks() -> None:
    verify_numerics(BASE, [BY_NAME[name] for name in ("together", "over 2 ranks", "over 4 ranks")], number=6)


def test_a_way_that_the_model_does_not_allow_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    three = replace(BY_NAME["over 2 ranks"], name="over 3 ranks", tables={"device": {"tensor_parallel": 3}})
    verify_numerics(BASE, [BY_NAME["together"], three], number=1)
    assert "left out:" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="num_attention_heads"):
        verify_numerics(BASE, [BY_NAME["together"], replace(three, if_possible=False)], number=1)


def test_the_command_fails_where_bits_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    def answers(config: Config, way: Way, requests: Sequence[Request], limit_s: float) -> list[Completion]:
        assert config.model.numerics == "invariant"
        tokens = [1, 2] if way.alone else [1, 3]
        return [
            Completion("", "", tokens, "length", None, Usage(prompt_tokens=1, completion_tokens=2, cached_tokens=0), ())
            for _ in requests
        ]

    monkeypatch.setattr(verify, "run", answers)
    with pytest.raises(CallboardError, match=r"other bits than alone: together$"):
        verify_numerics(BASE, [BY_NAME["alone"], BY_NAME["together"]], number=1)


def test_a_model_that_takes_its_time_gets_fewer_requests(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(verify, "FIRST_WAY_S", 0.0)
    verify_numerics(BASE, [BY_NAME["alone"], BY_NAME["together"]])
    assert "10 requests have the same bits in each of 2 ways." in capsys.readouterr().out


@pytest.mark.parametrize("number", [verify.LEAST_REQUESTS, verify.MOST_REQUESTS])
def test_requests_are_of_every_kind(number: int) -> None:
    params = [one for _, one in mixed_requests(number)]
    prompts = [prompt for prompt, _ in mixed_requests(number)]
    assert len(set(prompts)) < len(prompts)
    assert {one.temperature for one in params} == {0.0, 0.8}
    assert any(one.grammar for one in params)
    assert all(one.logprobs for one in params)
