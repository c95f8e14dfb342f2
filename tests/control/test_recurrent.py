"""A model with recurrent layers is refused with every setting that would not work with its states."""

from pathlib import Path
from typing import Any

import pytest

from callboard import LLM
from engine.types.errors import ConfigError, PluginError
from tests.models.checkpoints import build, save

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "ranks": ({"device": {"kind": "cpu", "tensor_parallel": 2}}, "device.tensor_parallel=2: the states"),
    "graphs": ({"graphs": {"mode": "breakable"}}, "graphs.mode=breakable: no graph holds recurrent"),
    "host pages": ({"kv": {"num_host_pages": 8}}, "kv.num_host_pages=8: pages return without the states"),
    "proposer": ({"plugins": {"proposer": "ngram"}}, "plugins.proposer=proposer.ngram: a rejected token"),
    "adapters": ({"lora": {"folder": "/tmp"}}, "lora.folder=/tmp: models with recurrent layers take no adapters"),
    "store": ({"plugins": {"kv_store": "files"}}, "plugins.kv_store=files: pages return without the states"),
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(build("lfm2"), tmp_path_factory.mktemp("lfm2"))


@pytest.mark.parametrize("what", REFUSED)
def test_a_setting_that_does_not_work_with_states_is_refused(what: str, checkpoint: Path) -> None:
    changes, said = REFUSED[what]
    config: dict[str, Any] = {"kv": {}, **changes}
    config["model"] = {"tokenizer": "none"} | config.get("model", {})
    with pytest.raises((ConfigError, PluginError), match=said):
        LLM(checkpoint, progress=False, config=config)
