"""Families of other packages: asked when they are named, and said to be there when they are not."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import ArceeConfig, ArceeForCausalLM

from callboard import LLM, SamplingParams
from engine.config import Config, build_config
from engine.plugins.families import list_families, read_model
from engine.settings.sections import PluginsSection
from engine.types.errors import PluginError, WeightsError
from server.cli import main
from tests.models.checkpoints import build, save
from tests.plugins.conftest import Install

TEMPLATE = Path(__file__).parents[2] / "examples" / "model_template" / "callboard_arcee"
SIZES: dict[str, Any] = {"vocab_size": 259, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
HEADS: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "bos_token_id": 1, "eos_token_id": 2}
NAMED = PluginsSection(models=["arcee"])
OUTPUT_LEN = 16


@pytest.fixture
def template(install: Install) -> None:
    sources = {f"callboard_arcee/{path.name}": path.read_text() for path in TEMPLATE.glob("*.py")}
    install("callboard-arcee", {"model.arcee": "callboard_arcee.family"}, sources)


@pytest.fixture(scope="module")
def reference() -> ArceeForCausalLM:
    torch.manual_seed(0)
    return ArceeForCausalLM(ArceeConfig(**SIZES, **HEADS, initializer_range=0.2)).eval()


def test_one_that_is_named_serves(template: None, reference: ArceeForCausalLM, tmp_path: Path) -> None:
    reference.save_pretrained(tmp_path / "checkpoint")
    prompt = list(range(5, 25))
    expected = reference.generate(
        torch.tensor([prompt]), do_sample=False, max_new_tokens=OUTPUT_LEN, eos_token_id=None, pad_token_id=0
    )
    config = {
        "plugins": {"models": ["arcee"]},
        "model": {"path": str(tmp_path / "checkpoint"), "tokenizer": "none", "dtype": "float32"},
        "kv": {"num_pages": 64},
        "device": {"kind": "cpu"},
    }
    with LLM(progress=False, config=config) as llm:
        params = SamplingParams(temperature=0, max_tokens=OUTPUT_LEN, ignore_eos=True)
        (output,) = llm.generate([prompt], params)
    assert list(output.token_ids) == expected[0, len(prompt) :].tolist()


def test_one_that_is_not_named_is_said_to_be_there(
    template: None,
    reference: ArceeForCausalLM,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    reference.config.architectures = ["ArceeForCausalLM"]
    reference.config.save_pretrained(tmp_path / "checkpoint")
    with pytest.raises(WeightsError, match=r"the installed plugin arcee reads it: name it in plugins\.models"):
        read_model(tmp_path / "checkpoint")
    assert read_model(tmp_path / "checkpoint", NAMED).architecture == "ArceeForCausalLM"
    main(["models"])
    assert "once plugins.models names arcee" in " ".join(capsys.readouterr().out.split())
    assert [one.info.name for one in list_families(NAMED) if one.serves and not one.info.built_in] == ["model.arcee"]


CLAIM = """
from callboard.plugins import hookimpl
CALLBOARD_PLUGIN = {"api": 1, "architectures": {"LlamaForCausalLM": "llama"}}
@hookimpl
def callboard_model(context):
    return RESULT
"""


def test_a_named_one_goes_before_the_built_in_and_must_give_a_shape(install: Install, tmp_path: Path) -> None:
    checkpoint = save(build("llama"), tmp_path / "checkpoint")
    sources = {"one.py": CLAIM.replace("RESULT", "None"), "other.py": CLAIM.replace("RESULT", "None")}
    install("acme", {"model.one": "one", "model.other": "other"}, sources)
    with pytest.raises(PluginError, match=r"model\.one \(acme 1\.0\): callboard_model must be .*, and built None"):
        read_model(checkpoint, PluginsSection(models=["one"]))
    with pytest.raises(PluginError, match="one and other both read LlamaForCausalLM; name one of them"):
        read_model(checkpoint, PluginsSection(models=["one", "other"]))
    with pytest.raises(
        PluginError, match="no model plugin named 'nobody'; available: apertus, bamba, cohere, deepseek_v2"
    ):
        read_model(checkpoint, PluginsSection(models=["nobody"]))
    assert read_model(checkpoint).architecture == "LlamaForCausalLM"


def test_a_backend_that_lacks_what_the_model_needs_is_refused_by_name(tmp_path: Path) -> None:
    from engine.plugins.manager import Plugins
    from engine.plugins.selection import check_named, expected_context

    spec = read_model(save(build("gpt-oss"), tmp_path / "checkpoint"))
    context = expected_context(build_config(Config(), {"device": {"kind": "cpu"}}), spec.shape)
    assert context.needs == ("sinks", "layer_windows")
    plugins = Plugins({"attention": "tiles"})
    with pytest.raises(PluginError, match=r"tiles .*needs attention sinks, which it does not do; can run .*torch"):
        check_named(plugins, context)


READS_ANOTHER = """
import msgspec
from callboard.plugins import hookimpl
from engine.plugins.model import llama
CALLBOARD_PLUGIN = {"api": 1, "architectures": {"LlamaForCausalLM": "llama"}}
@hookimpl
def callboard_model(context):
    shape = llama.callboard_model(context)
    layers = [
        msgspec.structs.replace(one, attention=msgspec.structs.replace(one.attention, output_bias=True))
        for one in shape.layers
    ]
    return msgspec.structs.replace(shape, layers=tuple(layers))
"""


def test_one_that_reads_a_tensor_that_is_not_there_is_refused_at_start(install: Install, tmp_path: Path) -> None:
    checkpoint = save(build("llama"), tmp_path / "checkpoint")
    install("acme", {"model.acme": "acme_family"}, {"acme_family.py": READS_ANOTHER})
    config = {
        "plugins": {"models": ["acme"]},
        "model": {"path": str(checkpoint), "tokenizer": "none", "dtype": "float32"},
        "kv": {"num_pages": 64},
        "device": {"kind": "cpu"},
    }
    with pytest.raises(WeightsError, match=r"model\.layers\.0\.self_attn\.o_proj\.bias"):
        LLM(progress=False, config=config)
