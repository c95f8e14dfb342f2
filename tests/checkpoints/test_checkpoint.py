"""Where a model path leads and what is read from config.json, in its new and old spellings, whole and broken."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError

from engine.checkpoints import checkpoint
from engine.checkpoints.checkpoint import SamplingDefaults, resolve_checkpoint
from engine.checkpoints.shape import RotaryShape
from engine.plugins import declaration
from engine.plugins.families import read_model
from engine.types.errors import WeightsError

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 259,
    "max_position_embeddings": 512,
    "eos_token_id": 2,
}


def write(directory: Path, changes: dict[str, Any], generation: dict[str, Any] | None = None) -> Path:
    """A directory with config.json; a change to None removes the field."""
    config = {name: value for name, value in {**CONFIG, **changes}.items() if value is not None}
    (directory / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (directory / "generation_config.json").write_text(json.dumps(generation))
    return directory


def test_defaults_of_a_sparse_config(tmp_path: Path):
    spec = read_model(write(tmp_path, {"num_key_value_heads": None}))
    assert (spec.architecture, spec.vocab_size, spec.max_len, spec.dtype) == ("LlamaForCausalLM", 259, 512, "float32")
    assert (spec.shape.num_kv_heads, spec.shape.head_size, spec.shape.norm.eps) == (4, 16, 1e-6)
    assert spec.shape.layers[0].attention.rotary == RotaryShape(theta=10000.0)
    assert spec.eos_token_ids == (2,)
    assert spec.sampling == SamplingDefaults()
    assert spec.config["hidden_size"] == 64


def test_eos_ids_of_both_files_are_united(tmp_path: Path):
    directory = write(tmp_path, {"eos_token_id": [2, 9]}, {"eos_token_id": [9, 7]})
    spec = read_model(directory)
    assert spec.eos_token_ids == (2, 7, 9)


def test_ids_that_the_model_does_not_have_are_left_out_and_named(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    many = [*range(259, 300), 2]
    spec = read_model(write(tmp_path, {"eos_token_id": many}, {"eos_token_id": [258, 1 << 40]}))
    assert spec.eos_token_ids == (2, 258)
    config, generation = tmp_path / "config.json", tmp_path / "generation_config.json"
    assert [record.getMessage() for record in caplog.records] == [
        f"{config}: eos_token_id has 41 ids past the model's last, 258; ignored: {', '.join(map(str, many[:8]))}",
        f"{generation}: eos_token_id has 1 ids past the model's last, 258; ignored: 1099511627776",
    ]


@pytest.mark.parametrize("value", [-1, [2, -1], True, [False], "2", ["2"], 2.0, {"id": 2}, [[2]], float("nan")])
@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
def test_what_is_no_token_id_is_refused(tmp_path: Path, value: object, file: str):
    changes = {"eos_token_id": value}
    write(tmp_path, *((changes, {}) if file == "config.json" else ({}, changes)))
    with pytest.raises(WeightsError, match=rf"{file}: eos_token_id is .*, expected a whole number or a list of whole"):
        read_model(tmp_path)


def test_no_eos_id_at_all_is_allowed(tmp_path: Path):
    assert read_model(write(tmp_path, {"eos_token_id": None})).eos_token_ids == ()


def test_sampling_defaults_come_from_generation_config(tmp_path: Path):
    generation = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "repetition_penalty": 1.1, "do_sample": True}
    assert read_model(write(tmp_path, {}, generation)).sampling == SamplingDefaults(0.6, 20, 0.95, 1.1)
    assert read_model(write(tmp_path, {}, {"temperature": 0})).sampling.temperature == 0


@pytest.mark.parametrize(
    ("changes", "dtype"),
    [
        ({"dtype": "bfloat16"}, "bfloat16"),
        ({"torch_dtype": "float16"}, "float16"),
        ({"torch_dtype": "torch.float32"}, "float32"),
    ],
)
def test_dtype_in_both_spellings(tmp_path: Path, changes: dict[str, Any], dtype: str):
    assert read_model(write(tmp_path, changes)).dtype == dtype


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    ("changes", "rotary"),
    [
        ({"rope_theta": 5e5}, RotaryShape(theta=5e5)),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, RotaryShape(theta=1e6)),
        (
            {"rope_theta": 1e6, "rope_scaling": {"type": "linear", "factor": 2}},
            RotaryShape(kind="linear", theta=1e6, factor=2),
        ),
        (
            {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
            RotaryShape(kind="llama3", theta=5e5, factor=8, original_max_len=64),
        ),
        (
            {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}},
            RotaryShape(kind="llama3", theta=5e5, factor=8, original_max_len=64),
        ),
        (
            {
                "rope_scaling": {
                    "type": "yarn",
                    "factor": 4.0,
                    "original_max_position_embeddings": 128,
                    "attention_factor": 1.5,
                }
            },
            RotaryShape(kind="yarn", factor=4, original_max_len=128, attention_factor=1.5),
        ),
    ],
)
def test_rotary_settings_in_both_spellings(tmp_path: Path, changes: dict[str, Any], rotary: RotaryShape):
    assert read_model(write(tmp_path, changes)).shape.layers[0].attention.rotary == rotary


@pytest.mark.parametrize(
    ("changes", "window"),
    [
        ({"architectures": ["MistralForCausalLM"]}, (0, 0)),  # 4096, longer than the model
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 100}, (100, 0)),
        ({"architectures": ["Qwen2ForCausalLM"], "sliding_window": 100}, (0, 0)),
        ({"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True, "sliding_window": 100}, (0, 0)),
        (
            {
                "architectures": ["Qwen3ForCausalLM"],
                "use_sliding_window": True,
                "sliding_window": 100,
                "max_window_layers": 2,
            },
            (100, 2),
        ),
    ],
)
def test_sliding_windows(tmp_path: Path, changes: dict[str, Any], window: tuple[int, int]):
    shape = read_model(write(tmp_path, changes)).shape
    assert (shape.window, shape.first_window_layer) == window


BROKEN_CONFIGS: list[tuple[dict[str, Any], str]] = [
    (
        {"architectures": ["BloomForCausalLM"]},
        "BloomForCausalLM (model_type None) is no causal language model of transformers",
    ),
    ({"architectures": None}, "architectures is null"),
    ({"architectures": [3]}, "architectures is"),
    ({"hidden_size": None}, "hidden_size is missing, expected a whole number"),
    ({"hidden_size": "64"}, 'hidden_size is "64", expected a whole number from 1 to'),
    ({"hidden_size": 64.0}, "hidden_size is 64.0"),
    ({"hidden_size": 1 << 40}, "hidden_size is 1099511627776, expected a whole number from 1 to 1048576"),
    ({"hidden_size": 66}, "hidden_size is 66, expected a multiple of num_attention_heads=4"),
    ({"vocab_size": 0}, "vocab_size is 0"),
    ({"vocab_size": True}, "vocab_size is true"),
    ({"num_hidden_layers": -1}, "num_hidden_layers is -1"),
    ({"num_key_value_heads": 3}, "num_key_value_heads is 3, expected a divisor"),
    ({"head_dim": 15}, "head_dim is 15, expected an even number"),
    ({"hidden_act": "relu"}, 'hidden_act is "relu", expected one of silu, gelu, gelu_pytorch_tanh'),
    ({"max_position_embeddings": None}, "max_position_embeddings is missing"),
    ({"rms_norm_eps": float("nan")}, "rms_norm_eps is NaN"),
    ({"tie_word_embeddings": 1}, "tie_word_embeddings is 1, expected true or false"),
    ({"eos_token_id": ["a"]}, "eos_token_id is"),
    ({"dtype": "int8"}, 'dtype is "int8", expected one of float32, bfloat16, float16'),
    (
        {"rope_scaling": {"type": "proportional", "factor": 2}},
        'rope_scaling is "proportional", expected one set of rotary settings',
    ),
    ({"rope_scaling": {"type": "linear"}}, "rope_scaling: factor is missing"),
    ({"rope_scaling": {"type": "yarn", "factor": 2, "mscale": -1, "mscale_all_dim": 1}}, "mscale is -1"),
    ({"rope_scaling": "linear"}, 'rope_scaling is "linear", expected an object'),
    ({"rope_parameters": {"full_attention": {"rope_theta": 1}}}, "expected one set of rotary settings"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
    ({"layer_types": ["full_attention", "sliding_attention", "full_attention"]}, "expected full_attention as kind 1"),
    ({"layer_types": ["full_attention"]}, "expected a list of 3 kinds, as the settings of the window give; leave"),
    ({"quantization_config": {"quant_method": "exl2"}}, "expected one of awq, compressed-tensors, fp8, gptq"),
]


@pytest.mark.parametrize(("changes", "reason"), BROKEN_CONFIGS, ids=[reason[:30] for _, reason in BROKEN_CONFIGS])
def test_broken_config_names_file_and_field(tmp_path: Path, changes: dict[str, Any], reason: str):
    with pytest.raises(WeightsError) as caught:
        read_model(write(tmp_path, changes))
    assert str(caught.value).startswith(f"{tmp_path / 'config.json'}: ")
    assert reason in str(caught.value)


def test_without_transformers_an_unknown_architecture_is_named_with_those_that_are_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(declaration, "_installed", lambda package: package != "transformers")
    known = 'architectures is "BloomForCausalLM", expected one of ApertusForCausalLM, BambaForCausalLM, Co'
    with pytest.raises(WeightsError, match=rf"config\.json: {known}.*pip install 'callboard\[transformers\]'"):
        read_model(write(tmp_path, {"architectures": ["BloomForCausalLM"]}))


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b"\xff\xfe", "not valid JSON"),
        (b"[" * 100_000, "not valid JSON"),
        (b"[]", "holds list, expected a JSON object"),
        (b" " * (17 << 20), "larger than"),
    ],
)
@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_unreadable_json_names_the_file(tmp_path: Path, name: str, content: bytes, reason: str):
    write(tmp_path, {})
    (tmp_path / name).write_bytes(content)
    with pytest.raises(WeightsError, match=reason) as caught:
        read_model(tmp_path)
    assert str(tmp_path / name) in str(caught.value)


def test_missing_config_says_what_a_checkpoint_is(tmp_path: Path):
    with pytest.raises(WeightsError, match=r"config\.json: no such file"):
        read_model(tmp_path)
    (tmp_path / "config.json").mkdir()
    with pytest.raises(WeightsError, match=r"config\.json: Is a directory"):
        read_model(tmp_path)


def test_paths_that_lead_nowhere(tmp_path: Path):
    for path in (str(tmp_path / "absent"), "", "org/../name", "a/b/c"):
        with pytest.raises(WeightsError, match="no such directory"):
            resolve_checkpoint(path, "")
    (tmp_path / "file").write_text("")
    with pytest.raises(WeightsError, match="is a file, expected a checkpoint directory"):
        resolve_checkpoint(str(tmp_path / "file"), "")


def test_existing_directory_wins_over_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "org" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert resolve_checkpoint("org/name", "") == tmp_path / "org" / "name"


def test_demo_is_looked_for_in_the_source_tree_then_where_it_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(checkpoint, "__file__", str(tmp_path / "engine" / "models" / "checkpoint.py"))
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "prefix"))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(WeightsError, match="the demo model is not installed"):
        resolve_checkpoint("demo", "")
    installed = tmp_path / "prefix" / "share" / "callboard" / "demo_model"
    source = tmp_path / "examples" / "demo_model"
    for place in (installed, source):
        place.mkdir(parents=True)
        (place / "config.json").write_text("{}")
        assert resolve_checkpoint("demo", "") == place


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (GatedRepoError, "access to it must be granted"),
        (RepositoryNotFoundError, "neither a directory here nor a model on the hub"),
        (LocalEntryNotFoundError, "the hub could not be reached"),
        (ConnectionError, "the hub could not be reached"),
    ],
)
def test_hub_errors_are_one_sentence(monkeypatch: pytest.MonkeyPatch, error: type[Exception], reason: str):
    def fail(*_: object, **__: object) -> str:
        instance = error.__new__(error)
        instance.args = ("first line\nsecond line",)
        raise instance

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(WeightsError, match=reason) as caught:
        resolve_checkpoint("org/name", "v1")
    assert str(caught.value).startswith("org/name@v1: ")
    assert "\n" not in str(caught.value)


def test_only_weights_configuration_and_tokenizer_are_downloaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    asked: dict[str, Any] = {}
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **more: asked.update(more) or str(tmp_path))
    assert resolve_checkpoint("org/name", "") == tmp_path
    assert asked["revision"] is None
    assert not any(pattern.endswith((".bin", ".pt", ".py")) or pattern == "*" for pattern in asked["allow_patterns"])


def test_reading_a_checkpoint_needs_no_torch():
    code = "import sys, engine.checkpoints.checkpoint, engine.checkpoints.shards; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
