"""The fingerprint that answers carry: the same for the same weights and numerics, another for others."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from engine.config import Config, build_config
from engine.plugins.families import read_model
from engine.settings.own_kernels import VARIABLE
from server.model_card import _fingerprint

DEMO = Path(__file__).parents[2] / "examples" / "demo_model"


def fingerprint(tables: dict[str, Any]) -> str:
    config = build_config(Config(), tables)
    return _fingerprint(SimpleNamespace(config=config, model=read_model(DEMO, config.plugins)))  # type: ignore[arg-type]


def test_it_tells_what_may_change_an_answer_and_nothing_else() -> None:
    plain = fingerprint({})
    assert plain == fingerprint({"kv": {"num_pages": 77}, "scheduler": {"max_running": 3}})
    others = ({"numerics": "invariant"}, {"quantization": "int8"}, {"load_format": "dummy"})
    tables = ({"plugins": {"linear": "torch"}}, {"kv": {"dtype": "int8"}}, *({"model": one} for one in others))
    assert len({plain, *map(fingerprint, tables)}) == 6


def test_it_tells_whether_kernels_in_c_compute_or_torch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """They sum in another order, so the last bits differ."""
    compiler = tmp_path / "cc"
    compiler.write_text("#!/bin/sh\n")
    compiler.chmod(0o755)
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setenv("CC", str(compiler))
    own = fingerprint({})
    monkeypatch.setenv("CC", str(tmp_path / "missing"))
    none = fingerprint({})
    monkeypatch.setenv("CC", str(compiler))
    monkeypatch.setenv(VARIABLE, "torch")
    assert own != none == fingerprint({})
