"""The conformance kit for model families: a tiny checkpoint, written by transformers, must give the same results here.

    from callboard.plugins.testing import check_model
    check_model(callboard_model, AcmeForCausalLM(AcmeConfig(hidden_size=64, ...)), tmp_path)

Owns: the cases.  Does not know: families, transformers' classes; it calls the reference like any torch module.
"""

import re
from collections.abc import Callable, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from msgspec.structs import replace
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from engine.checkpoints.checkpoint import ModelSpec, read_spec
from engine.checkpoints.fields import Fields
from engine.checkpoints.shape import DecoderShape
from engine.checkpoints.shards import SINGLE_FILE
from engine.layers.attention import AttentionBatch
from engine.layers.comm import Comm
from engine.models.loader import load_model
from engine.models.model import Model
from engine.plugins.comm.local import LocalComm
from engine.plugins.hookspecs import ModelContext
from engine.plugins.linear.onednn import onednn_linears
from engine.plugins.proof.findings import Findings
from engine.plugins.testing.steps import Driver
from engine.plugins.testing.threads import on_ranks
from engine.types.errors import WeightsError

CPU = torch.device("cpu")
TOLERANCE = 1e-4  # of logits, against the reference's in float32
NUM_SEQUENCES, OUTPUT_LEN = 8, 64
LONGEST_PROMPT = 60
JOINS = 20  # the step in which the last sequence joins
CHUNK = 13
# Operations that wait for values, or whose work depends on values: a graph cannot contain them.
WAITING = ("aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::bincount")

Hook = Callable[..., DecoderShape | None]


def check_model(
    hook: Hook,
    reference: Any,
    directory: Path,
    *,
    ranks: int = 2,
    captured: bool = True,
    options: Mapping[str, Any] | None = None,
) -> None:
    """Check a family in everything.  Raises ConformanceError with every case that fails.

    hook: the plugin's ``callboard_model``.  reference: a PreTrainedModel with a language model's head, in float32 and
    ``eval`` mode, small, with weights so large (a deviation of 0.1 to 0.2) that its logits differ.  directory: an empty
    one, for its checkpoint.  ranks: number of ranks that share the model in one case; 1 if it cannot be shared.
    captured: whether steps must be capturable as CUDA graphs.  options: the plugin's own.
    """
    findings = Findings(f"model family of {type(reference).__name__}")
    reference.save_pretrained(directory)
    spec: list[ModelSpec] = []
    with findings.case("config.json is read"):
        found = read_spec(directory, _reader(hook, options or {}))
        spec.append(replace(found, shape=found.shape.for_length(LONGEST_PROMPT + OUTPUT_LEN)))
    if not spec:
        findings.conclude()
    load = _Loading(spec[0])
    prompts = [_prompt(spec[0].vocab_size, 1 + number * (LONGEST_PROMPT - 1) // 7, number) for number in range(8)]
    with findings.case("logits of a prompt, in one step and by pages of 1"):
        _check_logits(reference, Driver(load(), 1, num_pages=200).step({"a": prompts[-1]})["a"], prompts[-1])
    outputs: list[list[int]] = []
    with findings.case("greedy tokens of a ragged batch with one that joins midway, pages of 16, prompts whole"):
        outputs = _continued(Driver(load(), 16, num_pages=80), prompts, LONGEST_PROMPT)
        _check_greedy(reference, prompts, outputs)
    with findings.case(f"the same tokens with pages of 1 and prompts in chunks of {CHUNK}"):
        again = _continued(Driver(load(), 1, num_pages=1200), prompts, CHUNK)
        assert again == outputs, f"sequences {[n for n, one in enumerate(again) if one != outputs[n]]} differ"
    if ranks > 1:
        with findings.case(f"{ranks} ranks"):
            for logits in on_ranks(ranks, lambda comm: _stepwise(Driver(load(comm)), prompts[-1])):
                _check_logits(reference, logits, prompts[-1])
    with findings.case("dummy weights, which do not depend on the number of ranks"):
        _check_dummy(load, prompts[-1], ranks)
    if captured:
        with findings.case("steps that depend on shapes alone, as required by graphs"):
            _check_operations(Driver(load()), prompts)
    _check_broken_weights(findings, load, directory)
    findings.conclude()


class _Loading:
    """Loads a rank's part of one checkpoint in float32."""

    def __init__(self, spec: ModelSpec) -> None:
        self.spec = spec

    def __call__(self, comm: Comm | None = None, dummy: bool = False) -> Model:
        load_format: Any = "dummy" if dummy else "safetensors"
        return load_model(
            self.spec,
            comm or LocalComm(),
            CPU,
            torch.float32,
            load_format,
            7,
            linears=onednn_linears(torch.float32),
            progress=False,
        )


def _reader(hook: Hook, options: Mapping[str, Any]) -> Callable[[str, Fields], DecoderShape]:
    def read(architecture: str, fields: Fields) -> DecoderShape:
        shape = hook(context=ModelContext(architecture, fields, dict(options)))
        assert isinstance(shape, DecoderShape), f"the hook returned {shape!r:.100}, not a DecoderShape"
        return shape

    return read


def _prompt(vocab_size: int, length: int, seed: int) -> list[int]:
    return torch.randint(vocab_size, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@torch.no_grad()
def _expected(reference: Any, tokens: list[int]) -> Tensor:
    logits: Tensor = reference(torch.tensor([tokens])).logits[0].float()
    return logits


def _stepwise(driver: Driver, tokens: list[int]) -> Tensor:
    """Return logits of a prompt whose last tokens are added one by one."""
    parts = [tokens[:-5], *([token] for token in tokens[-5:])]
    return torch.cat([driver.step({"a": part})["a"] for part in parts])


def _check_logits(reference: Any, got: Tensor, tokens: list[int]) -> None:
    expected = _expected(reference, tokens)
    assert expected.std() > 0.05, f"the reference's logits are flat ({expected.std():.2g}); give it larger weights"
    assert got.shape == expected.shape, f"logits are {list(got.shape)}, the reference's {list(expected.shape)}"
    error_T = (got - expected).abs().amax(-1)
    first = int((~(error_T <= TOLERANCE)).int().argmax())
    assert bool((error_T <= TOLERANCE).all()), f"logits are off by {error_T.max():.3g}, first at position {first}"


def _continued(driver: Driver, prompts: list[list[int]], chunk: int) -> list[list[int]]:
    """Return OUTPUT_LEN greedy tokens for each prompt; the last sequence joins when the others have some."""
    outputs: list[list[int]] = [[] for _ in prompts]
    left = [list(prompt) for prompt in prompts]
    for number in range(OUTPUT_LEN + JOINS + LONGEST_PROMPT):
        batch: dict[str, list[int]] = {}
        for index, output in enumerate(outputs):
            if len(output) < OUTPUT_LEN and (index < len(prompts) - 1 or number >= JOINS):
                batch[str(index)], left[index] = left[index][:chunk], left[index][chunk:]
        if not batch:
            break
        for name, logits in driver.step(batch, rows="last").items():
            index = int(name)
            if not left[index]:
                outputs[index].append(int(logits.argmax()))
                left[index] = outputs[index][-1:]
    return outputs


def _check_greedy(reference: Any, prompts: list[list[int]], outputs: list[list[int]]) -> None:
    """Compare one sequence with ``generate``, and each token of all sequences with the reference's next choice."""
    prompt = torch.tensor([prompts[-2]])
    with torch.no_grad():
        generated = reference.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            do_sample=False,
            max_new_tokens=OUTPUT_LEN,
            eos_token_id=None,
            pad_token_id=0,
        )
    expected = generated[0, prompt.shape[1] :].tolist()
    assert outputs[-2] == expected, f"sequence {len(prompts) - 2}: {_first_difference(outputs[-2], expected)}"
    for index, (prompt_ids, output) in enumerate(zip(prompts, outputs, strict=True)):
        chosen = _expected(reference, prompt_ids + output)[len(prompt_ids) - 1 : -1].argmax(-1).tolist()
        assert output == chosen, f"sequence {index}: {_first_difference(output, chosen)}"


def _first_difference(got: list[int], expected: list[int]) -> str:
    place = next(place for place, (one, other) in enumerate(zip(got, expected, strict=True)) if one != other)
    return f"token {place} of the output is {got[place]}, the reference's {expected[place]}"


def _check_dummy(load: _Loading, tokens: list[int], ranks: int) -> None:
    expected = Driver(load(dummy=True)).step({"a": tokens})["a"]
    assert expected.isfinite().all(), "logits of dummy weights are not finite"
    assert expected.std() > 0, "logits of dummy weights are all alike"
    for logits in on_ranks(ranks, lambda comm: Driver(load(comm, dummy=True)).step({"a": tokens})["a"]):
        error = (logits - expected).abs().max()
        assert error <= TOLERANCE, f"logits of {ranks} ranks differ by {error:.3g} from those of one"


class RecordedOperations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the names of the operations that run."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func._schema.name)
        return func(*args, **(kwargs or {}))


class _NoAttention:
    """A stand-in for an attention backend: graphs are broken at attention, or backends handle capture themselves."""

    def __init__(self, value_size: int) -> None:
        self._value_size = value_size

    def plan_step(self, batch: AttentionBatch) -> None:
        """Do nothing: there is nothing to plan."""

    def attend(self, layer: int, q_TNH: Tensor) -> Tensor:
        """Return the queries themselves, cut to the width of values."""
        return q_TNH[..., : self._value_size].clone()


def _check_operations(driver: Driver, prompts: list[list[int]]) -> None:
    driver.attention = _NoAttention(driver.model.attention_spec.value_size)
    runs = []
    for name, tokens in (("a", prompts[-1][:16]), ("b", prompts[-2][:16])):
        with RecordedOperations() as operations:
            driver.step({name: tokens}, rows="last")
        runs.append(operations.names)
    waits = sorted({name for name in runs[0] if name in WAITING})
    assert not waits, f"a step calls {', '.join(waits)}, which wait for values"
    assert runs[0] == runs[1], "two steps of the same shape do not run the same operations"


def _check_broken_weights(findings: Findings, load: _Loading, directory: Path) -> None:
    """Check that each missing tensor that is read, an extra one, and one of another shape are named in an error."""
    path = directory / SINGLE_FILE
    whole = path.read_bytes()
    tensors = load_file(path)
    unread = re.compile("|".join(load.spec.shape.unread) or r"(?!)")
    read = [one for one in tensors if not unread.search(one)]
    name = max(read, key=lambda one: tensors[one].numel())
    for missing in read:
        with findings.case(f"without {missing}"), _refused(missing):
            save_file({one: tensor for one, tensor in tensors.items() if one != missing}, path)
            load()
    with findings.case("a tensor too many"), _refused("layers.7.stranger.weight"):
        save_file({**tensors, "layers.7.stranger.weight": torch.zeros(2)}, path)
        load()
    with findings.case("a tensor of another shape"), _refused(name):
        save_file({**tensors, name: torch.zeros(3, 5)}, path)
        load()
    path.write_bytes(whole)


@contextmanager
def _refused(name: str) -> Any:
    message = ""
    try:
        yield
    except WeightsError as error:
        message = str(error)
    assert message, "the checkpoint was loaded all the same"
    assert name in message, f"the error does not name {name}: {message}"
