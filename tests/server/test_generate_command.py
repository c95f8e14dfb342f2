"""`callboard generate`: what it prints of a prompt, and of one that is refused."""

from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from engine.types.errors import FieldError
from server import cli


class _Model:
    """A model that says "ab", or refuses.  See ``LLM``."""

    def __init__(self, refuses: bool) -> None:
        self._refuses = refuses

    def __enter__(self) -> "_Model":
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing to stop."""

    def stream(self, prompt: str, params: object) -> Iterator[SimpleNamespace]:
        if self._refuses:
            raise FieldError("temperature", "must be from 0 to 100")
        yield from (SimpleNamespace(text=text) for text in "ab")


ARGUMENTS = ["generate", "hi ", "--set", "device.kind='cpu'"]


def test_a_prompt_is_shown_with_its_output(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("server.commands.talking.LLM", lambda **_: _Model(refuses=False))
    cli.main(ARGUMENTS)
    assert capsys.readouterr().out == "hi ab\n"


def test_an_error_has_a_line_of_its_own(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("server.commands.talking.LLM", lambda **_: _Model(refuses=True))
    with pytest.raises(SystemExit) as ended:
        cli.main(ARGUMENTS)
    assert ended.value.code != 0
    said = capsys.readouterr()
    assert (said.out, said.err) == ("", "callboard: temperature: must be from 0 to 100\n")
