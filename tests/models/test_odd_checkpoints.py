"""Checkpoints that say things twice, in old words, or against each other: transformers' greedy tokens, or a refusal.

Every change is made to the files of a tiny checkpoint, and both sides read the same files.  Families share the reader
of the fields, so odd words are read for two of them, and those about windows, heads and refusals for all.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from engine.checkpoints.shards import INDEX_FILE, SINGLE_FILE
from engine.models.decoder import Decoder
from engine.models.loader import load_model
from engine.plugins.families import read_model
from engine.plugins.linear.onednn import onednn_linears
from engine.plugins.testing.steps import Driver
from engine.plugins.testing.threads import ThreadComm, on_ranks
from engine.types.errors import WeightsError
from tests.models.checkpoints import LINEAR, LLAMA3, SIZES, VOCAB, YARN, build, random_tokens, save
from tests.models.conftest import Cases, load

pytestmark = pytest.mark.slow

PROMPT = random_tokens(40, 5)
OUTPUT_LEN = 12
FAMILIES = {"llama": "llama", "mistral": "mistral-no-window", "qwen2": "qwen2", "qwen3": "qwen3"}
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"

PLAIN = {"rope_type": "default", "rope_theta": 10000.0}
YARN_ALONE = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
WINDOW = {"use_sliding_window": True, "max_window_layers": 1, "layer_types": ...}


def both(scaling: dict[str, Any], parameters: dict[str, Any] = PLAIN, **more: Any) -> dict[str, Any]:
    """A config as transformers 5 writes it, and what a model card says to add."""
    return {"rope_parameters": parameters, "rope_scaling": scaling, **more}


ODD_CONFIGS: dict[str, dict[str, Any]] = {
    "both, linear": both(LINEAR),
    "both, linear without theta": both({"rope_type": "linear", "factor": 4.0}),
    "both, linear in the oldest spelling": both({"type": "linear", "factor": 4.0}),
    "both, two types": both({"type": "default", "rope_type": "linear", "factor": 4.0}),
    "both, llama3": both(LLAMA3),
    "both, dynamic": both({"rope_type": "dynamic", "factor": 2.0}),
    "both, yarn": both(YARN),
    "both, yarn without theta": both(YARN_ALONE),
    "both, yarn without a length": both({"type": "yarn", "factor": 2.0}),
    "both, without a type": both({"factor": 4.0}),
    "both, only a theta": both({"rope_theta": 500.0}),
    "both, another theta said": both({**LINEAR, "rope_theta": 700.0}, {**PLAIN, "rope_theta": 500.0}),
    "both, theta beside them": both({"type": "linear", "factor": 4.0}, {"rope_type": "default"}, rope_theta=500.0),
    "both, linear over yarn": both(LINEAR, YARN),
    "both, nothing over linear": both({}, LINEAR),
    "both, null over linear": {"rope_parameters": LINEAR, "rope_scaling": None},
    "null and null": {"rope_parameters": None, "rope_scaling": None, "rope_theta": 500.0},
    "theta in and beside": {"rope_parameters": {**PLAIN, "rope_theta": 500.0}, "rope_theta": 700.0},
    "theta beside": {"rope_parameters": {"factor": 4.0, "type": "linear"}, "rope_theta": 500.0},
    "all of a head": {"rope_parameters": {**LINEAR, "partial_rotary_factor": 1}},
    "length in and beside, yarn": {"rope_scaling": YARN, "original_max_position_embeddings": 16},
    "length in and beside, llama3": {"rope_scaling": LLAMA3, "original_max_position_embeddings": 256},
    "length beside": {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}, "original_max_position_embeddings": 64},
    "truncate is null": {"rope_scaling": {**YARN, "truncate": None}},
    "truncate is false": {"rope_scaling": {**YARN, "truncate": False}},
    "factor is null": {"rope_scaling": {**YARN, "factor": None}},
    "no eps": {"rms_norm_eps": ...},
    "a large eps": {"rms_norm_eps": 1.0},
    "what other families say": {"attn_logit_softcapping": 5.0, "attention_multiplier": 0.5, "layer_norm_eps": 0.5},
    "what is for training": {"attention_dropout": 0.5, "pretraining_tp": 2, "use_cache": False},
    "another type of the file": {"dtype": None, "torch_dtype": "bfloat16"},
    "ids past the end": {"eos_token_id": [2, VOCAB], "bos_token_id": VOCAB + 9},
}


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def checkpoint(cases: Cases, family: str, tmp_path: Path) -> Path:
    """A checkpoint to change, without a generation_config.json."""
    reference = cases[FAMILIES[family]].reference
    reference.config.save_pretrained(tmp_path)
    save_file({name: one.contiguous() for name, one in reference.state_dict().items()}, tmp_path / SINGLE_FILE)
    return tmp_path


def configure(directory: Path, changes: dict[str, Any]) -> None:
    """Change config.json as a person does; ``...`` removes a field, and what was said about rope goes first."""
    config = json.loads((directory / "config.json").read_text())
    changed = {**config, "rope_parameters": ..., **changes}
    kept = {name: value for name, value in changed.items() if value is not ...}
    (directory / "config.json").write_text(json.dumps(kept))


def rewrite(directory: Path, changes: dict[str, torch.Tensor | None]) -> None:
    tensors = {**load_file(directory / SINGLE_FILE), **changes}
    save_file({name: one for name, one in tensors.items() if one is not None}, directory / SINGLE_FILE)


def generated(directory: Path) -> list[int]:
    """By transformers, from the files."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    )
    tokens = torch.tensor([PROMPT])
    with torch.no_grad():
        result = model.eval().generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            do_sample=False,
            max_new_tokens=OUTPUT_LEN,
            eos_token_id=None,
            pad_token_id=0,
        )
    output: list[int] = result[0, len(PROMPT) :].tolist()
    return output


def continued(model: Decoder) -> list[int]:
    """By ours."""
    driver, step, output = Driver(model), PROMPT, list[int]()
    for _ in range(OUTPUT_LEN):
        step = [int(driver.step({"a": step}, rows="last")["a"].argmax())]
        output += step
    return output


@pytest.mark.parametrize("family", ["llama", "qwen3"], indirect=True)
@pytest.mark.parametrize("name", ODD_CONFIGS)
def test_an_odd_config_means_what_it_means_to_transformers(checkpoint: Path, name: str):
    configure(checkpoint, ODD_CONFIGS[name])
    assert continued(load(read_model(checkpoint))) == generated(checkpoint)


REFUSED_CONFIGS: list[tuple[dict[str, Any], str]] = [
    (
        both({"rope_type": "linear", "factor": 4.0}, {**PLAIN, "rope_theta": 500.0}),
        r"rope_scaling is .*expected it to repeat rope_theta 500\.0 of rope_parameters",
    ),
    (both({"rope_type": "proportional", "factor": 2.0}), 'rope_scaling is "proportional"'),
    (both(LINEAR, partial_rotary_factor=0.5), "partial_rotary_factor is 0.5"),
    ({"rope_scaling": {**LLAMA3, "high_freq_factor": 0.5}}, "high_freq_factor is 0.5, expected at least low_"),
    ({"is_causal": False}, "is_causal is false, expected true"),
    ({"model_type": "mixtral"}, 'model_type is "mixtral", expected "'),
]


@pytest.mark.parametrize(("changes", "reason"), REFUSED_CONFIGS, ids=[reason[:30] for _, reason in REFUSED_CONFIGS])
def test_what_would_be_another_model_is_refused(checkpoint: Path, changes: dict[str, Any], reason: str):
    configure(checkpoint, changes)
    with pytest.raises(WeightsError, match=reason):
        read_model(checkpoint)


def test_a_window_is_what_it_is_to_transformers_or_refused(checkpoint: Path, family: str):
    """A Llama has none, but transformers' cache forgets what a window does not reach.  Of 1, it forgets nothing."""
    configure(checkpoint, {"sliding_window": 9, **WINDOW})
    if family == "llama":
        with pytest.raises(WeightsError, match="sliding_window is 9, expected null"):
            read_model(checkpoint)
    else:
        assert continued(load(read_model(checkpoint))) == generated(checkpoint)
    configure(checkpoint, {"sliding_window": 1, **WINDOW})
    with pytest.raises(WeightsError, match="sliding_window is 1, expected "):
        read_model(checkpoint)
    configure(checkpoint, {"sliding_window": SIZES["max_position_embeddings"], **WINDOW})
    assert continued(load(read_model(checkpoint))) == generated(checkpoint)


# ---- heads and layouts ----------------------------------------------------------------------------


def other_head(directory: Path) -> torch.Tensor:
    """Not the embedding."""
    embedding = load_file(directory / SINGLE_FILE)[EMBEDDING]
    return torch.randn(embedding.shape, generator=torch.Generator().manual_seed(7)) * 0.3


def one_row_differs(directory: Path) -> torch.Tensor:
    """The embedding but for its last row, which only the last of several ranks has."""
    embedding, other = load_file(directory / SINGLE_FILE)[EMBEDDING], other_head(directory)
    return torch.cat((embedding[:-1], other[-1:] * 100))


def the_same(directory: Path) -> torch.Tensor:
    """The embedding once more."""
    return load_file(directory / SINGLE_FILE)[EMBEDDING].clone()


def into_shards(directory: Path) -> None:
    """Cut the single file in two, the embedding in one and the head in the other."""
    tensors = load_file(directory / SINGLE_FILE)
    files = {name: f"{'one' if name == HEAD else 'other'}.safetensors" for name in tensors}
    for file in set(files.values()):
        save_file({name: one for name, one in tensors.items() if files[name] == file}, directory / file)
    (directory / INDEX_FILE).write_text(json.dumps({"metadata": {}, "weight_map": files}))
    (directory / SINGLE_FILE).unlink()


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("head", [other_head, one_row_differs, the_same])
def test_a_head_in_the_file_counts_whatever_the_config_says(
    checkpoint: Path, head: Callable[[Path], torch.Tensor], tied: bool, sharded: bool
):
    configure(checkpoint, {"tie_word_embeddings": tied})
    rewrite(checkpoint, {HEAD: head(checkpoint)})
    if sharded:
        into_shards(checkpoint)
    expected = generated(checkpoint)
    spec = read_model(checkpoint)
    model = load(spec)
    assert continued(model) == expected
    assert (model.head is model.embedding) == (tied and head is the_same), "an equal head costs no memory"

    def work(comm: ThreadComm) -> list[int]:
        return continued(
            load_model(
                spec,
                comm,
                torch.device("cpu"),
                torch.float32,
                "safetensors",
                0,
                linears=onednn_linears(torch.float32),
                progress=False,
            )
        )

    assert on_ranks(2, work) == [expected] * 2


@pytest.mark.parametrize(
    ("tied", "head", "reason"),
    [
        (False, None, "tensor 'lm_head.weight' of shape .* is missing"),
        (True, torch.zeros(VOCAB - 1, 64), "tensor 'lm_head.weight' has shape"),
        (True, torch.zeros(()), "tensor 'lm_head.weight' has shape"),
        (True, torch.zeros(VOCAB, 64, dtype=torch.int32), "tensor 'lm_head.weight' has dtype I32"),
    ],
)
def test_a_head_that_is_missing_or_does_not_fit_is_refused(
    checkpoint: Path, tied: bool, head: torch.Tensor | None, reason: str
):
    configure(checkpoint, {"tie_word_embeddings": tied})
    rewrite(checkpoint, {HEAD: head})
    with pytest.raises(WeightsError, match=reason):
        load(read_model(checkpoint))


def test_what_predicts_several_tokens_is_not_read(tmp_path: Path):
    """Released files of DeepSeek-V3 have it as one more layer."""
    directory = save(build("deepseek-v3"), tmp_path)
    rewrite(directory, {"model.layers.3.eh_proj.weight": torch.ones(2, 2)})
    load(read_model(directory))
    rewrite(directory, {"model.layers.4.eh_proj.weight": torch.ones(2, 2)})
    with pytest.raises(WeightsError, match=r"model\.layers\.4\.eh_proj.weight' has no place"):
        load(read_model(directory))


def test_a_single_file_counts_before_shards_from_before(checkpoint: Path):
    single = (checkpoint / SINGLE_FILE).read_bytes()
    configure(checkpoint, {"tie_word_embeddings": False})
    rewrite(checkpoint, {HEAD: other_head(checkpoint)})
    into_shards(checkpoint)
    from_shards = generated(checkpoint)
    (checkpoint / SINGLE_FILE).write_bytes(single)
    rewrite(checkpoint, {HEAD: the_same(checkpoint)})
    expected = generated(checkpoint)
    assert expected != from_shards
    assert continued(load(read_model(checkpoint))) == expected
