"""The numbers that the sampler reports and that the trainer computes are the same: their difference is 0, not small."""

import itertools
import json
import runpy
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from callboard import LLM, ConfigError, PluginError, RequestError, SamplingParams, WeightsError
from callboard.training import TrainedModel, log_probs, reference_log_probs
from engine.features.weight_updates import planner
from engine.features.weight_updates.planner import WeightsPlanner
from engine.features.weight_updates.rank import WeightsRank
from engine.messages import Step
from engine.models.model import Model
from engine.types.versions import mark
from tests.models.checkpoints import SIZES, build, save
from tests.workers.executors import send

ROOT = Path(__file__).parents[1]
FLOAT = {"dtype": "float32"}
CUT = SamplingParams(
    temperature=0.7, top_p=0.9, top_k=30, logprobs=0, processed_logprobs=True, max_tokens=24, ignore_eos=True, seed=3
)
RAW = SamplingParams(temperature=1.3, logprobs=0, max_tokens=24, ignore_eos=True, seed=4)
MOST_BATCHES = 6
PROMPTS = [[5, 9, 23], list(range(20, 61)), [7] * 9, [3, 4] * 6]


def tables(**more: dict[str, Any]) -> dict[str, Any]:
    model = {**FLOAT, "numerics": "invariant", "tokenizer": "none", **more.pop("model", {})}
    return {"kv": {"num_pages": 300, "page_size": 4}, "model": model, "device": {"threads": 1}, **more}


def sampled(directory: Path, params: SamplingParams, **more: dict[str, Any]) -> list[tuple[list[int], torch.Tensor]]:
    """Each prompt with its output, and what the sampler reports for the output's tokens."""
    with LLM(directory, config=tables(**more), progress=False) as llm:
        outputs = llm.generate(PROMPTS, params)
    reported = [torch.tensor([one.sampled.logprob for one in output.logprobs]) for output in outputs]
    return [(prompt + output.token_ids, one) for prompt, output, one in zip(PROMPTS, outputs, reported, strict=True)]


def apart(model: TrainedModel, drawn: list[tuple[list[int], torch.Tensor]], params: SamplingParams) -> float:
    """The largest difference between sampler and trainer."""
    found = log_probs(model, [sequence for sequence, _ in drawn], params)
    return max(
        float((one.detach()[-len(reported) :] - reported).abs().max())
        for one, (_, reported) in zip(found, drawn, strict=True)
    )


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(build("llama"), tmp_path_factory.mktemp("training"))


@pytest.fixture
def trained() -> Iterator[TrainedModel]:
    model = TrainedModel(build("llama"), tables())
    yield model
    model.close()


@pytest.mark.parametrize("params", [CUT, RAW], ids=["processed", "raw"])
def test_the_difference_is_zero_before_and_after_a_step_of_the_optimizer(
    params: SamplingParams, llama: Path, trained: TrainedModel, tmp_path: Path
) -> None:
    drawn = sampled(llama, params)
    assert apart(trained, drawn, params) == 0.0
    optimizer = torch.optim.SGD(trained.module.parameters(), lr=0.5)
    loss = torch.cat(log_probs(trained, [sequence for sequence, _ in drawn], RAW)).mean()
    loss.backward()
    optimizer.step()
    assert apart(trained, drawn, params) > 0.0, "the weights are others"
    drawn = sampled(save(trained.module, tmp_path), params)
    assert apart(trained, drawn, params) == 0.0


@pytest.mark.slow
@pytest.mark.parametrize(
    "more",
    [
        {"scheduler": {"prefill_chunk": 5, "max_running": 2}},
        {"plugins": {"proposer": "ngram"}},
        {"kv": {"num_pages": 30, "page_size": 4}},
    ],
    ids=["chunks", "speculation", "retractions"],
)
def test_the_difference_is_zero_however_tokens_were_drawn(
    more: dict[str, Any], llama: Path, trained: TrainedModel
) -> None:
    assert apart(trained, sampled(llama, CUT, **more), CUT) == 0.0


@pytest.mark.slow
def test_the_difference_is_zero_in_bfloat16(tmp_path: Path) -> None:
    given = {"model": {"dtype": "bfloat16"}}
    module = build("qwen3").to(torch.bfloat16)
    model = TrainedModel(module, tables(**given))
    try:
        assert apart(model, sampled(save(module, tmp_path), CUT, **given), CUT) == 0.0
    finally:
        model.close()


@pytest.mark.slow
def test_the_difference_is_zero_with_experts(tmp_path: Path) -> None:
    model = TrainedModel(build("mixtral"), tables())
    try:
        assert apart(model, sampled(save(model.module, tmp_path), CUT), CUT) == 0.0
    finally:
        model.close()


def test_other_kernels_in_the_sampler_are_noticed(llama: Path, trained: TrainedModel) -> None:
    drawn = sampled(llama, RAW, model={"numerics": "fast", "quantization": "int8"})
    assert 0.0 < apart(trained, drawn, RAW) < 1.0


@pytest.mark.parametrize("way", ["fused", "data", "swapped"])
def test_every_change_of_the_weights_is_noticed(way: str, trained: TrainedModel) -> None:
    (before,) = log_probs(trained, [PROMPTS[1]])
    if way == "fused":  # such a step counts up no version of a parameter
        before.sum().backward()
        torch.optim.AdamW(trained.module.parameters(), lr=1e-4, fused=True).step()
    elif way == "swapped":
        weight = trained.module.get_parameter("model.norm.weight").data
        weight.copy_(weight.flip(0))
    else:
        trained.module.get_parameter("model.norm.weight").data[0] += 1e-3
    (after,) = log_probs(trained, [PROMPTS[1]])
    assert not torch.equal(before, after)
    expected = reference_log_probs(trained.module, [PROMPTS[1]], SamplingParams())
    assert torch.allclose(after, expected, atol=1e-4)


def test_a_module_that_computes_another_model_is_refused(trained: TrainedModel) -> None:
    trained.module.get_submodule("lm_head").register_forward_hook(lambda _, inputs, output: output * 3.0)
    with pytest.raises(WeightsError, match="more than rounding makes"):
        log_probs(trained, [PROMPTS[1]])


def test_sequences_of_every_length_and_parameters_of_every_kind(trained: TrainedModel) -> None:
    longest = trained.module.config.max_position_embeddings
    whole = [index % 90 + 2 for index in range(longest)]
    found = log_probs(trained, [whole, [5], [5, 6]])
    assert [len(one) for one in found] == [longest - 1, 0, 1]
    for asked in (
        CUT.replace(top_p=0.0),
        CUT.replace(temperature=1e-6),
        CUT.replace(temperature=0.05, top_p=1.0, top_k=0),
        RAW.replace(min_tokens=5, stop=("x",)),
        RAW.replace(logprob_token_ids=(3, 4), repetition_penalty=1.2),
    ):
        assert len(log_probs(trained, [PROMPTS[0]], asked)[0]) == len(PROMPTS[0]) - 1
    with pytest.raises(RequestError, match="repetition_penalty"):
        log_probs(trained, [PROMPTS[0]], CUT.replace(repetition_penalty=1.2))


@pytest.mark.slow
def test_an_executor_that_is_killed_reads_the_present_weights_again() -> None:
    model = TrainedModel(build("llama"), tables(placement={"executor": "process"}))
    try:
        log_probs(model, [PROMPTS[1]])
        with torch.no_grad():
            model.module.get_parameter("model.norm.weight").mul_(1.1)
        (before,) = log_probs(model, [PROMPTS[1]])
        send(signal.SIGKILL)
        (after,) = log_probs(model, [PROMPTS[1]])
        assert torch.equal(before, after)
    finally:
        model.close()


@pytest.mark.slow
def test_the_example_has_the_same_curve_with_a_server_that_is_disturbed_and_without_one(tmp_path: Path) -> None:
    curves = []
    for name, more in (("server", []), ("offline", ["--offline"])):
        command = [sys.executable, "examples/grpo/train.py", "--updates", "2", "--json", str(tmp_path / name), *more]
        subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL, timeout=600)
        curves.append(json.loads((tmp_path / name).read_text()))
    assert [one["apart"] for one in curves[0]] == [0.0] * 2
    assert curves[0] == curves[1]


def test_the_gradient_is_that_of_the_values_that_the_engine_computes(trained: TrainedModel) -> None:
    sequence = PROMPTS[1][:12]
    (values,) = log_probs(trained, [sequence])
    values.sum().backward()
    generator = torch.Generator().manual_seed(1)
    for name in ("model.layers.0.mlp.up_proj.weight", "model.layers.1.self_attn.q_proj.weight", "model.norm.weight"):
        weight = trained.module.get_parameter(name)
        assert weight.grad is not None
        direction = torch.randn(weight.shape, generator=generator)
        direction /= direction.norm()
        sums = []
        for step in (-0.02, 0.02):
            with torch.no_grad():
                weight.add_(direction, alpha=step)
                sums.append(float(trained.exact([sequence], RAW)[0].double().sum()))
                weight.sub_(direction, alpha=step)
        expected = float((weight.grad * direction).sum())
        assert (sums[1] - sums[0]) / 0.04 == pytest.approx(expected, rel=0.02, abs=0.02), name


def test_the_gradient_in_float64_is_that_of_finite_differences() -> None:
    module, sequence = build("gpt2").double(), PROMPTS[0]  # its class rounds nothing to float32
    name = "transformer.h.0.mlp.c_proj.weight"
    weight = module.get_parameter(name)

    def found(row: torch.Tensor) -> torch.Tensor:
        changed = torch.cat((row[None], weight.detach()[1:]))
        return torch.func.functional_call(_Scored(module), {f"module.{name}": changed}, (sequence, CUT))

    assert torch.autograd.gradcheck(found, (weight.detach()[0, :].clone().requires_grad_(),))


class _Scored(torch.nn.Module):
    """A module whose output is the reference's log probabilities."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.module = module

    def forward(self, sequence: list[int], params: SamplingParams) -> torch.Tensor:
        return reference_log_probs(self.module, [sequence], params)


def test_a_token_that_the_cuts_leave_out_has_no_probability(trained: TrainedModel) -> None:
    sequence = list(itertools.islice(itertools.cycle(range(2, 90)), 60))
    (found,) = log_probs(trained, [sequence], CUT.replace(top_k=1))
    assert set(found.detach().tolist()) <= {0.0, -torch.inf}


@pytest.mark.parametrize(("variant", "why"), [("gpt-oss", "attention sinks"), ("deepseek-v2", "latents")])
def test_models_without_such_bits_are_refused(variant: str, why: str) -> None:
    model = TrainedModel(build(variant), tables())
    with pytest.raises((ConfigError, PluginError), match=why):
        log_probs(model, [PROMPTS[1]])


def test_a_model_that_pools_is_refused() -> None:
    config = transformers.LlamaConfig(**SIZES, num_labels=2)
    model = TrainedModel(transformers.LlamaForSequenceClassification(config), tables())
    with pytest.raises(ConfigError, match="generate text"):
        log_probs(model, [PROMPTS[1]])


def test_weights_that_cannot_change_are_loaded_by_another_engine(
    trained: TrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(rank: WeightsRank) -> None:
        raise WeightsError("they have a fixed place")

    (before,) = log_probs(trained, [PROMPTS[1]])
    monkeypatch.setattr(WeightsRank, "_check_fixed", refuse)
    with torch.no_grad():
        trained.module.get_parameter("model.norm.weight").mul_(1.1)
    (after,) = log_probs(trained, [PROMPTS[1]])
    assert not torch.equal(before, after)
    assert torch.allclose(after, reference_log_probs(trained.module, [PROMPTS[1]], SamplingParams()), atol=1e-4)


def largest(num: int = 2, **more: dict[str, Any]) -> float:
    """The largest difference in batches under which weights change."""
    zero = runpy.run_path(str(ROOT / "examples" / "grpo" / "zero.py"))
    found = []
    for one in zero["batches"](zero["MODEL"], MOST_BATCHES, more):
        found.append(one)
        if len(found) >= num and any(one.spanning for one in found):  # when a change comes depends on the machine
            break
    assert any(one.spanning for one in found), "no answer has seen a change"
    return max(one.difference for one in found)


@pytest.mark.slow
def test_the_difference_is_zero_while_weights_change() -> None:
    assert largest() == 0.0


def no_bump(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planner names the version before."""
    monkeypatch.setattr(planner, "mark", lambda at, version: mark(at, str(int(version) - 1)))


def old_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages of weights before are found."""
    monkeypatch.setattr(WeightsPlanner, "_name_weights", lambda self, sequence: None)
    monkeypatch.setattr(WeightsPlanner, "_forget_pages", lambda self: None)


def late_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last rank changes a step after the others."""
    take_over, begin = WeightsRank._take_over, WeightsRank.begin
    late: dict[WeightsRank, list[Model]] = {}

    def waits(rank: WeightsRank, other: Model, **more: bool) -> None:
        if rank._context.comm.rank:
            late[rank] = [other, other]
        else:
            take_over(rank, other, **more)

    def begins(rank: WeightsRank, step: Step) -> None:
        begin(rank, step)
        if models := late.get(rank):
            other = models.pop()
            if not models:
                take_over(rank, other)

    monkeypatch.setattr(WeightsRank, "_take_over", waits)
    monkeypatch.setattr(WeightsRank, "begin", begins)


@pytest.mark.slow
@pytest.mark.parametrize(("mutant", "num"), [(no_bump, 1), (old_pages, 2), (late_rank, 1)])
def test_the_difference_notices_a_mutant(
    mutant: Callable[[pytest.MonkeyPatch], None], num: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    mutant(monkeypatch)
    assert largest(num) > 0.0


@pytest.mark.slow
def test_the_difference_notices_a_kernel_that_the_trainer_does_not_use() -> None:
    assert largest(1, model={"numerics": "fast", "quantization": "int8"}, device={"tensor_parallel": 1}) > 0.0
