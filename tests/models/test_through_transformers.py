"""Families that only transformers computes: the same tokens through our pages, or a refusal that says why."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from callboard import LLM, SamplingParams
from engine.models.through_transformers.linear import same_inputs, swap_linears
from engine.plugins.comm.local import LocalComm
from engine.plugins.families import read_model
from engine.plugins.model.transformers import callboard_model
from engine.plugins.testing.model import check_model
from engine.settings.sections import PluginsSection
from engine.types.errors import ConfigError, WeightsError
from tests.models.checkpoints import build, random_tokens, save
from tests.models.through_transformers import build_kind, has_experts, num_ranks
from tests.own_cache import use_own_cache

pytestmark = pytest.mark.slow

# Windows and a scale of logits; values narrower than keys, experts and a group of them; positions in a table, no plan.
FEW = ["cohere2", "youtu", "opt"]
THROUGH = PluginsSection(models=["transformers"])


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    use_own_cache(monkeypatch, tmp_path / "cache")
    return tmp_path / "cache"


@pytest.mark.parametrize("kind", FEW)
def test_the_reference_and_transformers_on_our_pages_agree(kind: str, tmp_path: Path):
    reference = build_kind(kind)
    check_model(
        callboard_model,
        reference,
        tmp_path / "checkpoint",
        ranks=num_ranks(kind),
        captured=not has_experts(reference),
    )


def test_a_native_family_gives_the_same_tokens_when_it_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    """Through the engine: prompts in chunks that share a prefix, two ranks, and rounded layers."""
    reference = build("qwen2-tied-upper-window")
    checkpoint = save(reference, tmp_path / "checkpoint")
    prefix = random_tokens(40, 3)
    prompts = [prefix + random_tokens(5 + 3 * number, number) for number in range(6)]
    config: dict[str, Any] = {
        "model": {"path": str(checkpoint), "tokenizer": "none", "dtype": "float32"},
        "kv": {"num_pages": 96, "page_size": 16},
        "device": {"kind": "cpu"},
        "scheduler": {"max_step_tokens": 48, "prefill_chunk": 16},
    }

    def served(**changes: Any) -> list[list[int]]:
        with LLM(progress=False, config=config | changes) as llm:
            params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
            return [list(one.token_ids) for one in llm.generate(prompts, params)]

    through = {"plugins": {"models": ["transformers"]}}
    with caplog.at_level("INFO"):
        expected = served()
        assert served(**through) == expected
    assert "Qwen2ForCausalLM is served through transformers" in caplog.text
    assert served(**through, device={"kind": "cpu", "tensor_parallel": 2}) == expected
    rounded = served(**through, model=config["model"] | {"quantization": "int8"})
    assert [len(one) for one in rounded] == [12] * len(prompts)


# What it is -> a model_type, what its configuration has, and what is said.
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "attention of its own": ("gptj", {}, "its attention is not called through transformers' attention interface"),
    "ALiBi, always": ("bloom", {}, r"its scores are biased by distance \(ALiBi"),
    "ALiBi, by a part of its configuration": ("mpt", {}, r"its scores are biased by distance \(ALiBi"),
    "ALiBi, by its configuration": ("falcon", {"alibi": True}, r"its scores are biased by distance \(ALiBi"),
    "an encoder": ("bert", {}, "its masks are neither causal nor those of a sliding window"),
    "masks of its own": ("doge", {}, "it computes with its masks, which are not made here"),
    "attention twice in a layer": ("diffllama", {}, "interface 4 times for 2 layers"),
    "mixed sinks": ("mimo_v2_flash", {}, "its layers have different sinks: False, True"),
    "recurrent layers": ("zamba2", {"layer_types": ["mamba", "hybrid"]}, "it has layers of kind"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_served_is_refused_by_name_at_start(what: str, tmp_path: Path):
    kind, changes, said = REFUSED[what]
    reference = build_kind(kind, **changes)
    reference.config.architectures = [type(reference).__name__]
    reference.config.save_pretrained(tmp_path)
    with pytest.raises(WeightsError, match=f"config.json: {type(reference).__name__}.*{said}"):
        read_model(tmp_path)


def test_an_architecture_that_nobody_has_is_refused(tmp_path: Path):
    (tmp_path / "config.json").write_text('{"architectures": ["AcmeForCausalLM"], "model_type": "acme"}')
    said = r"AcmeForCausalLM \(model_type 'acme'\) is no causal language model of tr.*`callboard models` lists"
    with pytest.raises(WeightsError, match=said):
        read_model(tmp_path)


def test_without_a_plan_ranks_are_refused(tmp_path: Path):
    from engine.models.model import build_model
    from engine.plugins.testing.threads import ThreadComm

    reference = build_kind("opt")
    reference.config.architectures = ["OPTForCausalLM"]
    reference.config.save_pretrained(tmp_path)
    shape = read_model(tmp_path).shape
    with pytest.raises(ConfigError, match="tensor_parallel=2: transformers has no tensor-parallel plan for OPTForCaus"):
        build_model(shape, ThreadComm(0, [None] * 2, None), torch.device("meta"), torch.float32)


def test_what_generates_nothing_is_refused(tmp_path: Path):
    save(build("llama"), tmp_path)
    (tmp_path / "modules.json").write_text('[{"type": "Transformer", "path": ""}]')
    assert read_model(tmp_path).use.kind == "embed"
    with pytest.raises(WeightsError, match=r"an embedding model is served only by .* share, and Llama"):
        read_model(tmp_path, THROUGH)


def test_an_answer_that_was_kept_gives_the_same_shape(tmp_path: Path):
    """Machines compare their shapes; transformers writes new names into the older rotary settings."""
    reference = build_kind("cohere2")
    config = reference.config.to_dict() | {"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 2.0}}
    (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": ["Cohere2ForCausalLM"]}))
    assert read_model(tmp_path).shape == read_model(tmp_path).shape


ASKED = """
import sys
from pathlib import Path
from engine.plugins.families import read_model
shape = read_model(Path(sys.argv[1])).shape
assert not {"torch", "transformers"} & set(sys.modules)
print(shape.num_layers, shape.window, shape.max_len, shape.names.embedding)
"""


def test_a_process_without_torch_asks_another_one_once(tmp_path: Path, cache: Path):
    reference = build_kind("cohere2")
    reference.config.architectures = ["Cohere2ForCausalLM"]
    reference.config.save_pretrained(tmp_path)

    def asked() -> str:
        command = [sys.executable, "-c", ASKED, str(tmp_path)]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    first = asked()
    assert first == "2 13 512 model.embed_tokens\n"
    (kept,) = cache.rglob("*.json")
    kept.write_bytes(kept.read_bytes().replace(b"model.embed_tokens", b"kept"))
    assert asked() == "2 13 512 kept\n"


class Stub(nn.Module):
    """Two linear layers that get one tensor, one that gets it after it was changed, and one that gets it twice."""

    def __init__(self) -> None:
        super().__init__()
        self._tp_plan: dict[str, str] = {}
        self.one, self.other, self.changed, self.twice = (nn.Linear(8, size) for size in (4, 6, 4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        said = torch.cat((self.one(x), self.other(x), self.twice(x), self.twice(x)), -1)
        return torch.cat((said, self.changed(x.add_(1))), -1)


def test_linear_layers_that_get_one_tensor_are_one_product():
    module = Stub()
    x = torch.randn(1, 3, 8)
    with torch.no_grad():
        expected = module(x.clone())
        weights = {name: tensor.clone() for name, tensor in module.named_parameters()}
        with same_inputs(module) as joined:
            module(torch.ones(1, 3, 8))
        assert joined == [("one", "other")]
        products = swap_linears(module, LocalComm(), torch.device("cpu"), torch.float32, joined)
        assert list(products) == ["one", "changed", "twice"]
        assert products["one"].linear.weight.shape == (10, 8)
        for one in products.values():
            for part in one.slices():
                part.target.copy_(weights[part.source])
        for _ in range(2):  # nothing is left over from the first time
            torch.testing.assert_close(module(x.clone()), expected)
