"""The engine of a configuration and a checkpoint, before weights are loaded."""

from pathlib import Path

import pytest

from engine.config import Config, build_config
from engine.control.engine_spec import engine_spec
from engine.host.stages import Stages
from tests.formats.stored import FP8, float8, write

BLOCKS = FP8 | {"weight_block_size": [128, 128]}


@pytest.mark.parametrize(
    ("generation", "new_enough", "width", "settings", "kept"),
    [
        (9, True, 8, {}, "fp8"),
        (8, True, 8, {}, "none"),
        (9, False, 8, {}, "none"),
        (9, True, 1 << 20, {}, "none"),
        (9, True, 8, {"device": {"kind": "cpu"}}, "none"),
        (9, True, 8, {"model": {"quantization": "none"}}, "none"),
        (9, True, 8, {"model": {"dtype": "float16"}}, "none"),
    ],
)
def test_float8_stays_as_it_is_where_a_gpu_multiplies_it(
    generation: int,
    new_enough: bool,
    width: int,
    settings: dict[str, dict[str, str]],
    kept: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("engine.plugins.linears.gpu_generation", lambda: generation)
    monkeypatch.setattr("engine.plugins.linears.multiplies_float8_blocks", lambda: new_enough)
    monkeypatch.setattr("engine.plugins.linears.FLOAT8_WIDTH", width)
    directory, _ = write(tmp_path, float8((128, 128), "weight_scale_inv"), BLOCKS)
    sections = {
        "model": {"path": str(directory), "tokenizer": "none", **settings.get("model", {})},
        "device": settings.get("device", {"kind": "cuda"}),
    }
    found = engine_spec(build_config(Config(), sections), Stages())
    assert found.config.model.quantization == kept
