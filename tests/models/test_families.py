"""Every built-in family passes the kit that authors of families use, on a checkpoint of each of its details.

``python -m tests.models.test_families`` writes docs/models.md with those that do.
"""

import importlib
import itertools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.checkpoints.shape import DecoderShape
from engine.checkpoints.text_part import TEXT_PARTS
from engine.plugins.declaration import read_declaration
from engine.plugins.manager import BUILTIN
from engine.plugins.model.transformers import callboard_model
from engine.plugins.proof.findings import ConformanceError
from engine.plugins.testing.model import check_model
from tests.models.checkpoints import LATER, NOT_PLAIN, build
from tests.models.hub import CHECKPOINTS, answers
from tests.models.through_transformers import KINDS, architecture_of, build_kind, has_experts, num_ranks

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
INTRODUCTION = """\
# Models

`callboard models` lists the architectures that can be served here, those of installed plugins among them. A
checkpoint is of the architecture that `architectures` in its `config.json` names first; another one is refused at
start, with a list of these.

Each family is a file of `engine/plugins/model/` that says what the model is made of, and passes the conformance kit
on tiny checkpoints that transformers writes, one for each variant below: in float32 its logits are within 1e-4 of
transformers', and 64 greedy tokens are the same, in a ragged batch of eight that one sequence joins midway, with
pages of 1 and of 16 tokens, with prompts whole and in chunks; two ranks give the same; a tensor that is missing is
named. [plugins.md](plugins.md) says how to add a family, and what a package of its own looks like. This page is
written by `python -m tests.models.test_families`.

- Mixtures of experts run on CPUs and on NVIDIA GPUs. On a GPU one kernel takes all experts of a layer, and
  `model.quantization` leaves them as they are; `graphs.mode = "compiled"` is for models without experts. The
  experts of gpt-oss are read in MXFP4, as they are published, and in floats.
- With several ranks each has a part of every expert; `model.experts = "divided"` gives each some of the experts whole,
  which keeps products large. Every rank has every token's state, so nothing but the sum of what they computed is
  exchanged, as without it: tokens are not sent to and fro (no all-to-all). What is served through transformers has no
  experts to divide.
- DeepSeek keeps one latent for each token and layer in the place of keys and values (V3: 576 numbers, not 40,960),
  whole on every rank. Prompts are computed on latents as well. The extra layers of V3 that predict several tokens are
  not read.
- Quantized checkpoints (AWQ, GPTQ, compressed-tensors, fp8: [checkpoints.md](checkpoints.md#quantized-weights))
  are read for all families but GPT-2, whose matrices lie as [inputs, outputs], and gpt-oss, whose experts lie in one
  tensor: these two are refused at start. MXFP4 is for gpt-oss. GGUF files, of one file each, are read for Llama,
  Mistral, Mixtral, Qwen2, Qwen3 with and without experts, Gemma 2 and 3, OLMo 2, Granite 3, SmolLM3 and ERNIE 4.5.
  `model.quantization` rounds the layers of every family at load, but not the routers of experts.
- Soft-capped scores (Gemma 2), attention sinks (gpt-oss) and latents (DeepSeek) need `attention.triton` or
  `attention.torch`, which `auto` then takes; the other backends are refused by name.
- With longrope (Phi-3, Phi-4) sequences end at the original length, up to which transformers uses the short factors: a
  longer one would need other keys from its first token on. Where the long factors are the same, they do not end there.
  Dynamic scaling changes nothing within the length that a model was trained for.
- Two settings of Gemma 3 differ from transformers. One with `attn_logit_softcapping`, which transformers reads and
  ignores, is refused. `truncate` of YaRN counts in each of the two sets of rotary settings; transformers looks for it
  beside them, so it takes true.
- Whatever no family knows is computed by its class in transformers, if that is installed (`pip install
  'callboard[transformers]'`): see below.

Every family's decoder is also read under another head, or under none: [pooling.md](pooling.md).

| architecture | family | checked as |
|---|---|---|"""
TEXT_PART = """
## The text part of models that read images or sound

Of these the text decoder is served as that decoder would be alone, by its own family or through transformers, or it is
refused; the log names the parts that are not read, and a request with an image, sound or video ends with 400. The
decoders of Gemma 3, Gemma 3n, Gemma 4, InternVL, LLaVA, Mistral 3, Ministral 3, Qwen2-VL, Qwen2.5-VL, Qwen3-VL (with
and without experts) and Qwen3-Omni are checked on tiny checkpoints in the published layout, by
`pytest tests/checkpoints/test_text_part.py`.

| architecture | its decoder |
|---|---|"""
NAMED = """
## Checkpoints

`callboard models CHECKPOINT` says of any checkpoint how it is served, from its `config.json` alone; of a name on the
hub it downloads no weights. Its answers for many that are downloaded most, by the settings that decide them
(`tests/models/hub.py`), with transformers 5.23:

| checkpoint | architecture | served |
|---|---|---|"""
THROUGH = """
## Through transformers

A decoder that none of these families knows is made of its class in transformers, whose attention calls and linear
layers are then ours: pages, prefix cache, chunked prompts, quantised weights, kernels and the scheduler are the same,
and the log says `served through transformers`. A family of its own is faster, as
`benchmarks/bench_through_transformers.py` measures. `plugins.models = ["transformers"]` serves the families above like
this, too.

What a class does is found out by running it without weights, once for each `config.json`: it must call transformers'
attention interface once for each layer, with masks that are causal or have one sliding window, and with keys and
values of the step's own tokens. All others are refused at start, with the reason: attention of their own or with ALiBi
(Falcon, Bloom, GPT-J, MPT), recurrent and hybrid models, encoders, layers with different numbers of query heads. Where
key/value heads differ from layer to layer (Gemma 4), every layer's pages are as large as those of the widest, and
layers that share keys and values (Gemma 3n, 4) each store them. Code that a repository brings along is not run.

With several ranks, what transformers' tensor-parallel plan cuts by columns and rows is cut, and the rest, such as
experts, is held by every rank; without a plan one rank serves. Experts are multiplied by transformers' own kernels, and
are not rounded by `model.quantization`. GPUs have not been tried yet.

Checked like the families above, on one tiny checkpoint each:

| architecture | `model_type` | ranks |
|---|---|---|"""
FAMILIES = {
    name: module for name, module in BUILTIN.items() if name.startswith("model.") and name != "model.transformers"
}
# Their CPU form picks experts by value.
WITH_EXPERTS = (
    "mixtral",
    "qwen3-moe",
    "gpt-oss",
    "deepseek-v2",
    "deepseek-v3",
    "glm4-moe",
    "minimax-m2",
    "mistral4",
    "deepseek-v32",
    "llama4",
    "llama4-one-expert",
)
CHECKED = ["llama", "mistral-window", "qwen2-tied-upper-window", "qwen3-yarn-bias", "seed-oss", *NOT_PLAIN, *LATER]


def family_of(architecture: str) -> str:
    """The module that declares it."""
    (module,) = [one for one in FAMILIES.values() if architecture in read_declaration(one).architectures]
    return module


def hook_of(architecture: str) -> Callable[..., DecoderShape]:
    """The function that reads its config.json."""
    hook: Callable[..., DecoderShape] = importlib.import_module(family_of(architecture)).callboard_model
    return hook


@pytest.mark.parametrize("variant", CHECKED)
def test_the_reference_and_the_family_agree(variant: str, tmp_path: Path):
    reference = build(variant)
    check_model(hook_of(type(reference).__name__), reference, tmp_path, captured=variant not in WITH_EXPERTS)


def test_every_family_is_among_them():
    architectures = {type(build(variant)).__name__ for variant in CHECKED}
    assert architectures == {name for one in FAMILIES.values() for name in read_declaration(one).architectures}


def render(passed: list[str], through: list[str], checkpoints: dict[str, str]) -> str:
    """The page docs/models.md."""
    rows = []
    for name in sorted(FAMILIES):
        declared = read_declaration(FAMILIES[name]).architectures
        details = [variant for variant in passed if type(build(variant)).__name__ in declared]
        rows.append(f"| `{'`, `'.join(declared)}` | `{name.removeprefix('model.')}` | {', '.join(details)} |")
    others = [
        f"| `{architecture_of(kind)}` | `{kind}` | {'1, 2' if num_ranks(kind) > 1 else '1'} |"
        for kind in sorted(through, key=architecture_of)
    ]
    parts = []
    for name, decoders in sorted(TEXT_PARTS.items()):
        own = dict.fromkeys(f"`{decoder}`" for decoder, _ in decoders.values())
        parts.append(f"| `{name}` | {', '.join(own)} |")
    named = [f"| `{name}` | `{CHECKPOINTS[name][0][0]}` | {said} |" for name, said in checkpoints.items()]
    sections = ([INTRODUCTION, *rows], [TEXT_PART, *parts], [NAMED, *named], [THROUGH, *others])
    return "\n".join([*itertools.chain.from_iterable(sections), ""])


@pytest.mark.slow
def test_the_page_has_what_passed(tmp_path: Path):
    page = render(CHECKED, KINDS, answers(tmp_path))
    assert PAGE.read_text() == page, "run python -m tests.models.test_families"


def main() -> None:
    """Take every variant through the kit, and write the page with those that pass."""
    passed = [
        variant
        for variant in CHECKED
        if passes(hook_of(type(build(variant)).__name__), build(variant), variant not in WITH_EXPERTS)
    ]
    through = []
    for kind in KINDS:
        reference = build_kind(kind)
        if passes(callboard_model, reference, not has_experts(reference), num_ranks(kind)):
            through.append(kind)
    with tempfile.TemporaryDirectory() as directory:
        PAGE.write_text(render(passed, through, answers(Path(directory))))


def passes(hook: Any, reference: Any, captured: bool, ranks: int = 2) -> bool:
    """Whether a model passes the kit; what does not is printed."""
    with tempfile.TemporaryDirectory() as directory:
        try:
            check_model(hook, reference, Path(directory), ranks=ranks, captured=captured)
        except ConformanceError as error:
            print(error)
            return False
    return True


if __name__ == "__main__":
    main()
