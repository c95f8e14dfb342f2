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
from tests.checkpoints import test_text_part
from tests.formats import test_quantized
from tests.formats.stored import FORMATS
from tests.models import test_published
from tests.models.checkpoints import HYBRID, LATER, LAYERED, NOT_PLAIN, VARIANTS, build
from tests.models.hub import CHECKPOINTS, answers, proof_of
from tests.models.through_transformers import KINDS, architecture_of, build_kind, has_experts, num_ranks

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
INTRODUCTION = """\
# Models

`callboard models` lists the architectures that can be served here, those of installed plugins among them. A
checkpoint's architecture is the first name of `architectures` in its `config.json`. One that is not in the list is
served [through transformers](#through-transformers) if possible, and otherwise refused at start.

Each family is a file of `engine/plugins/model/` that says what the model is made of, and passes the conformance kit
on tiny checkpoints that transformers writes, one for each variant below: in float32 its logits are within 1e-4 of
transformers', and 64 greedy tokens are the same, in a ragged batch of eight that one sequence joins midway, with
pages of 1 and of 16 tokens, with prompts whole and in chunks; two ranks give the same; a tensor that is missing is
named. [plugins.md](plugins.md) says how to add a family, and what a package of its own looks like. This page is written
by `python -m tests.models.test_families`.

- Mixtures of experts run on CPUs and on NVIDIA GPUs. On a GPU one kernel takes all experts of a layer, and
  `model.quantization` leaves them as they are; `graphs.mode = "compiled"` is for models without experts. The
  experts of gpt-oss are read in MXFP4, as they are published, and in floats. Those in MXFP4 stay in 4 bits, on CPUs too
  ([checkpoints.md](checkpoints.md#quantized-weights)).
- With several ranks each has a part of every expert; `model.experts = "divided"` gives each rank some whole experts,
  which keeps products large. Every rank has the states of all tokens, so no token is sent to an expert, and results
  are added up over the ranks, zeros included. With `"exchanged"` a rank sends only the results that it has, by an
  all-to-all, to the rank that adds them up (not in captured steps, and not with an expert that takes all tokens).
  Models that are served through transformers have no experts to divide.
- Recurrent layers keep a state of a fixed size for each running request, as
  [recurrent_layers.md](recurrent_layers.md) says: short convolutions (LFM2), the gated delta rule (Qwen3-Next,
  Qwen3.5, OLMo hybrid, Kimi-Linear), Mamba 2 (Granite 4, Nemotron-H, Falcon-H1, Bamba), lightning attention
  (MiniMax-Text-01). The layer for multi-token prediction of Nemotron is not read.
  [performance.md](performance.md#recurrent-layers) has the speed of these layers.
- OLMo hybrid and Kimi-Linear are read in the published layout. transformers saves the convolutions of OLMo hybrid, and
  the MLPs of Kimi-Linear, under other names or sizes: such a file is refused, with the first tensor that is missing.
  MiniMax-Text-01 and M1 are read in their first layout and in that of `-hf`; `rotary_dim` is the part of a head that
  rotates.
- DeepSeek keeps one latent for each token and layer in the place of keys and values (V3: 576 numbers, not 40,960),
  whole on every rank. Prompts are computed on latents as well. Layers for multi-token prediction are read with
  [`plugins.proposer = "mtp"`](scheduling.md#multi-token-prediction) alone. In DeepSeek V3.2 and GLM-5 a query sees the
  `index_topk` tokens (2,048) that an indexer chooses. Sequences end at this length, up to which these are all tokens,
  and the indexer is not read.
- Llama 4's layers with positions see chunks of 8,192 tokens, which `attention.torch` computes for any page size that
  divides them; the other attention backends are refused by name.
- Quantized checkpoints (AWQ, GPTQ, compressed-tensors, fp8: [checkpoints.md](checkpoints.md#quantized-weights))
  are read for all families but GPT-2, whose matrices lie as [inputs, outputs], and those whose experts lie in one
  tensor (gpt-oss, Llama 4, Mistral 4): these are refused at start. MXFP4 is for gpt-oss. GGUF files are read for all
  families but OLMo hybrid, Bamba and MiniMax-Text-01, with experts in any type of blocks
  (`pytest tests/formats/test_gguf_families.py`).
  `model.quantization` rounds the layers of every family at load, but not the routers of experts.
- Soft-capped scores (Gemma 2) need `attention.triton` or `attention.torch`. Attention sinks (gpt-oss) and latents
  (DeepSeek) need one of these, or `flash_attn` with FA3 (for sinks SGLang's build); `flash_mla` decodes over latents.
  `auto` measures those that are installed; the other backends are refused by name.
- With longrope (Phi-3.5, Phi-4-mini) one set of factors serves all tokens, and the log says which: the long ones, or
  the short ones with a `model.max_model_len` of at most the original length (4,096). transformers changes the set with
  a sequence's length: up to the original length it computes what the short ones do here, beyond it what the long ones
  do. A sequence that changed it here would change the keys of pages that others share; vLLM and llama.cpp choose by the
  context as well. Through transformers sequences end at the original length. Dynamic scaling changes nothing within the
  length that a model was trained for.
- Two settings of Gemma 3 differ from transformers. One with `attn_logit_softcapping`, which transformers reads and
  ignores, is refused. `truncate` of YaRN counts in each of the two sets of rotary settings; transformers looks for it
  beside them, so it takes true.
- Gemma 4's layers keep pages as large as their own heads, and layers that read the keys and values of others keep none
  (`pytest tests/layers/test_mixed_pool.py`). It is refused with `kv.dtype = "int8"`, LoRA, invariant numerics and
  EAGLE-3; a decode step on a CPU is not one call of C. On a GPU it has not been tried: its heads of 512 are computed by
  torch there, as the other kernels take 256 at most.
- A decoder of no family is computed by its class in transformers, if that is installed (`pip install
  'callboard[transformers]'`): see below.

Every family's decoder is also read under another head, or under none: [pooling.md](pooling.md).

| architecture | family | checked as |
|---|---|---|"""
TEXT_PART = """
## Models that read pictures

With `pip install 'callboard[images]'`, which brings Pillow and transformers, these read pictures in conversations;
without it, or with `plugins.encoder = "none"`, they read text alone. The decoder is callboard's own family. The
vision tower, the projector and the preparation of pixels are transformers', loaded without its language model; the
number of a picture's tokens is known from its size alone.

| architecture | also has | tokens of a picture |
|---|---|---|
| `Gemma3ForConditionalGeneration` | attention in both directions within a picture | 256; no pan and scan |
| `Gemma4ForConditionalGeneration` | the same in layers with a window, where the model has it | by size, at most 280 |
| `Idefics3ForConditionalGeneration`, `SmolVLMForConditionalGeneration` | | tiles and the whole |
| `InternVLForConditionalGeneration` | | up to 12 tiles and the whole |
| `LlavaForConditionalGeneration` (1.5) | | 576 |
| `LlavaNextForConditionalGeneration`, `LlavaOnevision...` | | tiles with breaks, and the whole |
| `LlavaForConditionalGeneration` (Pixtral), `Mistral3ForConditionalGeneration` | | by size, with breaks |
| `Qwen2VLForConditionalGeneration`, `Qwen2_5_VLForConditionalGeneration` | positions with three axes | by size |
| `Qwen3VLForConditionalGeneration`, `Qwen3VLMoe...` | the same, and rows for the first layers | by size |
| `Qwen3_5ForConditionalGeneration` | positions with three axes, recurrent layers | by size |

Each is checked on a tiny checkpoint: 64 greedy tokens equal those of `generate` of transformers in float32 for one
and three pictures, in chunks that cut a picture, cached, and several at once (`pytest -m slow
tests/features/images`). For Qwen2.5-VL so are retractions, a killed executor, two ranks, speculation by n-grams, a
host tier, and a cache of pictures for one at a time. `Qwen3_5Moe` takes the same way and is not checked with
pictures. On a GPU none of this has been checked yet.

- In Python, a part of a message's content is `{"type": "image", "image": PICTURE}`: a path, the bytes of a file, or a
  PIL image. Over HTTP see [api.md](api.md#pictures).
- A picture that conversations share is encoded once, and its pages are shared like those of a text, by its content
  and the encoder's settings. `images.cache_tokens` says how many tokens of pictures a rank keeps encoded; one request
  may not have more.
- Steps with tokens of pictures run without graphs, and so does every step in which a conversation with pictures
  decodes where positions have three axes. Steps of texts are not affected.
- Every rank encodes next to its steps. Pictures of several requests that wait are computed at once: up to 16 with 256
  tokens together on a CPU and 8,192 on a GPU; with `model.numerics = "invariant"` each alone, so that its rows have the
  same bits whatever else there is. With tensor parallelism each rank has the whole tower.
- `placement.encoder = "process"` encodes [in a process](processes.md#the-encoder-of-pictures) beside each executor: a
  picture that ends it costs no other request anything. With `inline`, the default, it is a thread of the executor.
- Refused by name: `prompt_logprobs`, `truncate_prompt_tokens` and embeddings of prompts with pictures; pictures with
  `plugins.proposer` `draft_model` or `eagle`, or with `kv.page_size = 1`; a picture of fewer than 4 tokens; videos
  of families without a processor of videos; Gemma 3n.
- A picture's `detail` is `auto`, `high` or `low`. `low` has fewer tokens where the processor has a way for it: no tiles
  for Idefics3, SmolVLM and InternVL, at most 512 x 512 pixels for Qwen, sides of at most 512 for Pixtral and Mistral 3,
  70 tokens for Gemma 4. Elsewhere it changes nothing. `auto` and `high` are what the processor gives by itself.
- LLaVA-OneVision's pictures are cut into tiles however many a conversation has, so that its tokens stay the same when
  one more comes; the processor of transformers has no tiles where several are given at once.
- Qwen2-VL, Qwen2.5-VL, Qwen3-VL, Qwen3.5, Gemma 4, SmolVLM, LLaVA-OneVision and InternVL 3 read
  [videos](api.md#videos), with the frames, pixels, texts and positions of transformers' processors of videos, and 64
  greedy tokens equal. Those processors need torchvision, and callboard does not. In Python a part is `{"type": "video",
  "video": FILM, "fps": NUMBER}`: a path or the bytes of an MP4 (`pip install 'callboard[video]'`) or of a moving GIF,
  WebP or PNG, or a list of pictures. Which frames of a file are shown is what the checkpoint's settings say (`fps`,
  `num_frames`, `do_sample_frames`); if they say nothing, Qwen3-VL and Qwen3.5 show two a second, Gemma 4 thirty-two,
  and the others every one. Of a list every frame is shown. A video's `detail` changes nothing.
- `return_prompt_ids` shows ids past the vocabulary for a picture's tokens.

A tiny model of SmolVLM's family answers a conversation with a new picture in 0.31 of the processor time of `generate`
of transformers, and eight conversations about one new picture in 0.33 of it, where that gets them as one batch: pixels,
encoder, prompt and 32 tokens, in float32 with one thread, the medians of 15 turns
(`python benchmarks/bench_pictures.py --shapes tiny`,
[pictures_2core_cpu.json](../benchmarks/results/pictures_2core_cpu.json)).

## The text part of models that read images or sound

Of other models, and of those above without an encoder, the text decoder is served as that decoder would be alone, by
its own family or through transformers, or it is refused; the log names the parts that are not read, and a request
with an image, sound or video ends with 400. The decoders of Gemma 3, Gemma 3n, Gemma 4, InternVL, Llama 4, LLaVA,
LLaVA-NeXT, LLaVA-OneVision, Mistral 3, Ministral 3, Mistral 4, Qwen2-VL, Qwen2.5-VL, Qwen3-VL (with and without
experts) and Qwen3-Omni are checked on tiny checkpoints in the published layout, by
`pytest tests/checkpoints/test_text_part.py`.

| architecture | its decoder |
|---|---|"""
NAMED = """
## Checkpoints

`callboard models CHECKPOINT` says of any checkpoint how it is served, from its `config.json` alone; of a name on the
hub it downloads no weights. Its answers for many that are downloaded most, by the settings that decide them
(`tests/models/hub.py`), with transformers 5.23.  Most name the test that compares a tiny checkpoint in the same layout
with transformers, token for token or by its logits in float32: `families` is
`tests/models/test_families.py::test_the_reference_and_the_family_agree`, `published` is
`tests/models/test_published.py`, `text_part` is `tests/checkpoints/test_text_part.py`, `quantized` is
`tests/formats/test_quantized.py`, `mxfp4` is `tests/formats/test_mxfp4.py`; `pytest "FILE::TEST[NAME]"` runs one.

| checkpoint | architecture | served | checked by |
|---|---|---|---|"""
THROUGH = """
## Through transformers

A decoder of none of these families is built from its class in transformers, whose attention calls and linear layers
callboard replaces: pages, prefix cache, chunked prompts, quantised weights, kernels and the scheduler are the same,
and the log says `served through transformers`. A family of its own is faster, as
`benchmarks/bench_through_transformers.py` measures. `plugins.models = ["transformers"]` serves the families above like
this.

Whether a class can be served is found out by running it without weights, once for each `config.json`: it must call
transformers' attention interface once for each layer, with masks that are causal or have one sliding window, and with
keys and values of the step's own tokens. All others are refused at start, with the reason: attention of their own or
with ALiBi (Falcon, Bloom, GPT-J, MPT), recurrent and hybrid models that no family above is for, encoders, layers with
different numbers of query heads. Where key/value heads differ from layer to layer, every layer's pages are as large as
those of the widest, and layers that share keys and values (Gemma 3n) each store them. Code that a repository contains
is not run.

With several ranks, what transformers' tensor-parallel plan cuts by columns and rows is cut, and the rest, such as
experts, is held by every rank; without a plan one rank serves. Experts are multiplied by transformers' own kernels, and
are not rounded by `model.quantization`. On a GPU only the demo model has been tried.

Checked like the families above, on one tiny checkpoint each:

| architecture | `model_type` | ranks |
|---|---|---|"""
FAMILIES = {
    name: module for name, module in BUILTIN.items() if name.startswith("model.") and name != "model.transformers"
}
PLAIN_CHECKED = ["llama", "mistral-window", "qwen2-tied-upper-window", "qwen3-yarn-bias", "seed-oss"]
OTHER_NAMES = {"MiniMaxText01ForCausalLM", "MiniMaxM1ForCausalLM"}  # which transformers calls MiniMaxForCausalLM
CHECKED = [*PLAIN_CHECKED, *NOT_PLAIN, *LATER, *HYBRID, *LAYERED]


def family_of(architecture: str) -> str:
    """The module that declares it."""
    (module,) = [one for one in FAMILIES.values() if architecture in read_declaration(one).architectures]
    return module


def hook_of(architecture: str) -> Callable[..., DecoderShape]:
    """The function that reads its config.json."""
    hook: Callable[..., DecoderShape] = importlib.import_module(family_of(architecture)).callboard_model
    return hook


def first_of_each_family() -> list[str]:
    """The first variant of each architecture that the fast part leaves out, with recurrent layers and without."""
    firsts = {(VARIANTS[variant][0], variant in HYBRID): variant for variant in reversed(CHECKED)}
    return [variant for variant in CHECKED if variant in firsts.values() and variant not in PLAIN_CHECKED]


FIRST = first_of_each_family()
OTHERS = [variant for variant in CHECKED if variant not in (*PLAIN_CHECKED, *FIRST)]


@pytest.mark.parametrize(
    "variant",
    [
        *PLAIN_CHECKED,
        *(pytest.param(one, marks=pytest.mark.slow) for one in FIRST),
        *(pytest.param(one, marks=pytest.mark.long) for one in OTHERS),
    ],
)
def test_the_reference_and_the_family_agree(variant: str, tmp_path: Path):
    reference = build(variant)
    hook = hook_of(type(reference).__name__)
    check_model(hook, reference, tmp_path, ranks=2, captured=not has_experts(reference))


def test_every_family_is_among_them():
    architectures = {type(build(variant)).__name__ for variant in CHECKED} | OTHER_NAMES
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
    named = [
        f"| `{name}` | `{CHECKPOINTS[name][0][0]}` | {said} | {proof_of(name, said)} |"
        for name, said in checkpoints.items()
    ]
    sections = ([INTRODUCTION, *rows], [TEXT_PART, *parts], [NAMED, *named], [THROUGH, *others])
    return "\n".join([*itertools.chain.from_iterable(sections), ""])


def test_what_a_checkpoint_names_is_a_test() -> None:
    tests = {f"families[{variant}]" for variant in CHECKED} | {f"published[{kind}]" for kind in test_published.KINDS}
    tests |= {f"text_part[{kind}]" for kind in (*test_text_part.KINDS, *test_text_part.DECODERS, "thinker")}
    tests |= {f"quantized[{name}]" for name in (*FORMATS, *test_quantized.AS_PUBLISHED)} | {"mxfp4[published]"}
    proofs = {name: proof_of(name, "natively") for name in CHECKPOINTS}
    assert {name: proof for name, proof in proofs.items() if proof and proof not in tests} == {}


@pytest.mark.parametrize("text", [INTRODUCTION, TEXT_PART, NAMED, THROUGH])
def test_the_page_has_the_text_between_its_tables(text: str) -> None:
    assert text in PAGE.read_text(), "the text is written here; then run python -m tests.models.test_families"


@pytest.mark.slow
def test_the_page_has_what_passed(tmp_path: Path):
    page = render(CHECKED, KINDS, answers(tmp_path))
    assert PAGE.read_text() == page, "run python -m tests.models.test_families"


def main() -> None:
    """Take every variant through the kit, and write the page with those that pass."""
    passed = []
    for variant in CHECKED:
        reference = build(variant)
        if passes(hook_of(type(reference).__name__), reference, not has_experts(reference)):
            passed.append(variant)
    through = []
    for kind in KINDS:
        reference = build_kind(kind)
        if passes(callboard_model, reference, not has_experts(reference), num_ranks(kind)):
            through.append(kind)
    with tempfile.TemporaryDirectory() as directory:
        PAGE.write_text(render(passed, through, answers(Path(directory))))


def passes(hook: Any, reference: Any, captured: bool, ranks: int = 2) -> bool:
    """Whether a model passes the kit; what does not is printed.  captured: the CPU form of experts cannot be."""
    with tempfile.TemporaryDirectory() as directory:
        try:
            check_model(hook, reference, Path(directory), ranks=ranks, captured=captured)
        except ConformanceError as error:
            print(error)
            return False
    return True


if __name__ == "__main__":
    main()
