"""``callboard chat`` samples as the checkpoint recommends, else as suits small models, and shows it first."""

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import pytest

from callboard import SamplingParams
from server.cli import main


class Chatted:
    """An engine that notes what it is asked for."""

    sampling_defaults: ClassVar[dict[str, float]] = {}
    params: ClassVar[list[SamplingParams]] = []

    def __init__(self, **_: Any) -> None: ...

    def __enter__(self) -> "Chatted":
        return self

    def __exit__(self, *_: object) -> None: ...

    def stream(self, prompt: Sequence[Any], params: SamplingParams) -> Iterator[Any]:
        self.params.append(params)
        return iter(())


@pytest.mark.parametrize(
    ("recommended", "flags", "expected", "shown"),
    [
        ({}, [], (0.7, 0.95, 0.05), "temperature 0.7, top_p 0.95, min_p 0.05"),
        ({}, ["--top-p", "0.5"], (0.7, 0.5, 0.05), "top_p 0.5"),
        ({"temperature": 0.6, "top_k": 20}, [], (0.6, 1.0, 0.0), "temperature 0.6, top_p 1, min_p 0"),
        ({"temperature": 0.6}, ["--temperature", "0", "--min-p", "0.1"], (0.0, 1.0, 0.1), "temperature 0, top_p 1"),
        ({"top_p": 0.8}, [], (0.7, 0.8, 0.0), "temperature 0.7, top_p 0.8"),
    ],
)
def test_parameters_are_the_users_then_the_checkpoints_then_those_for_small_models(
    recommended: dict[str, float],
    flags: list[str],
    expected: tuple[float, float, float],
    shown: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("server.commands.talking.LLM", Chatted)
    monkeypatch.setattr(Chatted, "sampling_defaults", recommended)
    monkeypatch.setattr(Chatted, "params", [])
    lines = iter(["hello", "/quit"])
    monkeypatch.setattr("rich.console.Console.input", lambda *_: next(lines))
    main(["chat", *flags])
    (params,) = Chatted.params
    assert (params.temperature, params.top_p, params.min_p) == expected
    assert params.top_k == recommended.get("top_k", 0)
    assert shown in capsys.readouterr().out
