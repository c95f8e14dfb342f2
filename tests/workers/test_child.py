"""What a child inherits of its parent's environment: all but secrets."""

from typing import Any, NoReturn

import msgspec
import pytest

from engine.workers import child
from engine.workers.child import SECRETS, Child


class Nothing(msgspec.Struct):
    """A ticket that says nothing."""


class NotStarted(Exception):
    """In place of a process."""


async def test_no_child_has_a_key_in_its_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}

    def started(command: list[str], **options: Any) -> NoReturn:
        given.update(options)
        raise NotStarted

    names = ("CALLBOARD_PLACEMENT__CLUSTER_KEY", "CALLBOARD_SERVER__API_KEY", "CALLBOARD_SERVER__OPERATOR_KEY")
    for name in names:
        monkeypatch.setenv(name, "a secret of the parent")
    monkeypatch.setenv("CALLBOARD_DEVICE__SEED", "7")
    monkeypatch.setattr(child.subprocess, "Popen", started)
    with pytest.raises(NotStarted):
        Child("nothing", Nothing(), lambda _: None)
    assert frozenset(names) == SECRETS
    assert "a secret of the parent" not in given["env"].values()
    assert given["env"]["CALLBOARD_DEVICE__SEED"] == "7"
