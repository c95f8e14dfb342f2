"""Adapters mixed in one batch give what each gives alone, which is what the reference gives with merged weights."""

import asyncio
import copy
import signal
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from engine.config import Config, build_config
from engine.control.system import System
from engine.execution.batch import Int32, Int64
from engine.execution.captured_steps import Decoded
from engine.execution.compiled_decodes import CompiledDecodes
from engine.execution.device import instruction_sets
from engine.features.lora.adapters import RankAdapters
from engine.features.lora.files import NAME, Adapter, AdapterRules, read_adapter
from engine.features.speculation.payoff import Payoff
from engine.kernels.panels import products
from engine.kv.node import Namespace
from engine.messages import RequestOptions, Step
from engine.sampling.captured import SamplingVariant
from engine.types.errors import RequestError
from engine.types.params import SamplingParams
from engine.types.prompt import RequestPart
from server.extensions.chaos.sim.liars import Everything
from tests.features.lora.made import ALL, MERGED, greedy, make_adapter, merged
from tests.models.checkpoints import build, random_tokens, save
from tests.workers.executors import send

NUM_NEW = 10
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_NEW, ignore_eos=True, logprobs=0, prompt_logprobs=0)
PROMPTS = [random_tokens(length, seed) for seed, length in enumerate((3, 40, 17, 40, 9, 23))]
NAMES = ("plain", "rooted", "", "few", "mixed", "plain")
Asked = tuple[list[int], str]
Said = tuple[list[int], list[float], int]


class Made:
    """A checkpoint, adapters below ``folder``, and the reference by the name of each; '' is the model itself."""

    def __init__(self, root: Path, variant: str, targets: Sequence[str] = ALL) -> None:
        self.reference = build(variant)
        self.directory = save(self.reference, root / "model", sharded=False)
        self.folder = root / "adapters"
        few = [one for one in ("q_proj", "down_proj", "in_proj", "in_proj_ba", "f_a_proj") if one in targets]
        made = {
            "plain": make_adapter(self.folder / "plain", self.reference, 1, targets=targets),
            "rooted": make_adapter(
                self.folder / "rooted", self.reference, 2, rank=8, use_rslora=True, lora_alpha=4, targets=targets
            ),
            "few": make_adapter(self.folder / "few", self.reference, 3, rank=2, targets=few),
            "mixed": make_adapter(
                self.folder / "mixed",
                self.reference,
                4,
                targets=targets,
                ranks={"v_proj": 7},
                alpha_pattern={"v_proj": 3, "up_proj": 16},
            ),
        }
        self.references: dict[str, PreTrainedModel] = {
            "": self.reference,
            **{name: merged(self.reference, path) for name, path in made.items()},
        }

    def config(self, **tables: dict[str, object]) -> Config:
        mine = {
            "model": {"path": str(self.directory), "tokenizer": "none"},
            "device": {"threads": 1},
            "kv": {"num_pages": 96, "page_size": 4},
            "scheduler": {"max_running": 16, "prefill_chunk": 16, "max_step_tokens": 64},
            "lora": {"folder": str(self.folder), "max_adapters": 4, "max_rank": 8},
        }
        for name, table in tables.items():
            mine[name] = {**mine.get(name, {}), **table}
        return build_config(Config(), mine)

    def adapters(self, system: System) -> dict[str, Adapter | None]:
        rules = msgspec.msgpack.decode(system.engine.facts[NAME], type=AdapterRules)
        return {name: read_adapter(self.folder / name, rules) if name else None for name in self.references}


def parts_of(adapter: Adapter | None) -> dict[str, RequestPart]:
    return adapter.parts if adapter is not None else {}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return Made(tmp_path_factory.mktemp("llama"), "llama-biases")


async def run(
    made: Made, config: Config, rounds: Sequence[Sequence[Asked]], params: SamplingParams = GREEDY
) -> list[list[Said]]:
    """Each round's requests at once: tokens, log probabilities of prompt and output, and cached tokens."""
    system = System(config)
    await system.start()
    try:
        adapters = made.adapters(system)

        async def one(prompt: list[int], name: str) -> Said:
            delta = await system.ingress.open(prompt, params, RequestOptions(parts=parts_of(adapters[name]))).collect()
            scores = [entry.sampled.logprob for entry in (*delta.prompt_logprobs[1:], *delta.logprobs)]
            assert delta.usage is not None
            return np.frombuffer(delta.token_ids, np.int32).tolist(), scores, delta.usage.cached_tokens

        return [await asyncio.gather(*(one(*asked) for asked in asked_at_once)) for asked_at_once in rounds]
    finally:
        await system.stop()


def check(made: Made, asked: Asked, said: Said) -> None:
    prompt, name = asked
    model = made.references[name]
    assert said[0] == greedy(model, prompt, NUM_NEW), name
    whole = torch.tensor([prompt + said[0]])
    with torch.inference_mode():
        # In float64, since the float32 of two libraries differ by up to the tolerance where torch has no vectors.
        scores = copy.deepcopy(model).double()(whole).logits[0].log_softmax(-1)
    expected = scores[:-1].gather(1, whole[0, 1:, None])[:, 0]
    np.testing.assert_allclose(said[1], expected.numpy(), atol=1e-4)


@pytest.mark.skipif(products() is None, reason="there is no C compiler, or no AVX2")
@pytest.mark.parametrize(("name", "least"), [("", NUM_NEW - 1), ("plain", 0)])
async def test_decode_steps_without_an_adapter_are_one_call_of_c(
    llama: Made, name: str, least: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch, ran = CompiledDecodes.launch, []

    def noted(self: CompiledDecodes, rows_N: Int64, lengths_N: Int32, variant: SamplingVariant) -> Decoded:
        ran.append(len(rows_N))
        return launch(self, rows_N, lengths_N, variant)

    monkeypatch.setattr(CompiledDecodes, "launch", noted)
    asked = [(prompt, name) for prompt in PROMPTS[:2]]
    (found,) = await run(llama, llama.config(), [asked])
    for one, said in zip(asked, found, strict=True):
        check(llama, one, said)
    assert len(ran) >= least
    assert bool(ran) == (name == "")


async def test_five_models_in_one_batch_are_each_the_merged_one(llama: Made) -> None:
    asked = [(prompt, name) for prompt in PROMPTS[:3] for name in llama.references]
    together, *alone = await run(llama, llama.config(), [asked, *([one] for one in asked[:5])])
    for one, said in zip(asked, together, strict=True):
        check(llama, one, said)
    for said, (again,) in zip(together, alone, strict=False):
        assert said[0] == again[0]
        np.testing.assert_allclose(said[1], again[1], atol=1e-4)


SETTINGS: dict[str, dict[str, dict[str, object]]] = {
    "two ranks": {"device": {"tensor_parallel": 2}},
    "four ranks, copies of heads": {"device": {"tensor_parallel": 4}},
    "one slot": {"lora": {"max_adapters": 1}},
    "two slots, short pool": {"lora": {"max_adapters": 2}, "kv": {"num_pages": 32}},
}


@pytest.mark.slow
@pytest.mark.parametrize("tables", SETTINGS.values(), ids=SETTINGS)
async def test_they_are_so_wherever_they_run(llama: Made, tables: dict[str, dict[str, object]]) -> None:
    asked = [*zip(PROMPTS, NAMES, strict=True)]
    (together,) = await run(llama, llama.config(**tables), [asked])
    for one, said in zip(asked, together, strict=True):
        check(llama, one, said)


async def test_they_are_so_where_tokens_are_proposed(llama: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model proposes without any adapter; with retractions, both tiers and two ranks."""
    monkeypatch.setattr(Payoff, "counts", Everything.counts)
    monkeypatch.setattr(Payoff, "knows", Everything.knows)
    take, most = RankAdapters.take, [0]

    def watched(self: RankAdapters, step: Step) -> dict[int, str]:
        most.append(max(np.frombuffer(step.prefill_samples, np.int32).tolist(), default=0))
        return take(self, step)

    monkeypatch.setattr(RankAdapters, "take", watched)
    tables: dict[str, dict[str, object]] = {
        "plugins": {
            "proposer": "draft_model",
            "policy": "fair",
            "options": {"proposer.draft_model": {"path": str(llama.directory)}},
        },
        "lora": {"max_adapters": 2},
        "kv": {"num_pages": 32, "num_host_pages": 32},
        "device": {"tensor_parallel": 2},
    }
    asked = [*zip(PROMPTS, NAMES, strict=True)]
    (together,) = await run(llama, llama.config(**tables), [asked])
    for one, said in zip(asked, together, strict=True):
        check(llama, one, said)
    assert max(most) > 2


@pytest.mark.parametrize("variant", ["qwen3-yarn-bias", "gemma2", "cohere", "olmo2", "phi3"])
async def test_they_are_so_in_other_families(variant: str, tmp_path: Path) -> None:
    made = Made(tmp_path, variant, (*ALL, *MERGED))
    asked = [*zip(PROMPTS, NAMES, strict=True)]
    (together,) = await run(made, made.config(), [asked])
    for one, said in zip(asked, together, strict=True):
        check(made, one, said)


ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MIXER = (*ATTENTION, "in_proj", "out_proj")
HYBRIDS = {
    "qwen3-5": (*ALL, "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj"),
    "qwen3-next": (*ATTENTION, "in_proj_qkvz", "in_proj_ba", "out_proj"),
    "lfm2": (*MIXER, "w1", "w2", "w3"),
    "granite4-hybrid": (*MIXER, "input_linear", "output_linear"),
    "falcon-h1": (*MIXER, *ALL),
    "nemotron-h": (*MIXER, "up_proj", "down_proj"),  # whose files have other names than transformers' modules
    "kimi-linear": ("k_proj", "v_proj", "b_proj", "g_a_proj", "g_b_proj", "f_a_proj", "f_b_proj"),  # some of these too
}


@pytest.mark.parametrize(
    ("variant", "num_ranks"),
    [("qwen3-5", 1), *(pytest.param(one, 2, marks=pytest.mark.slow) for one in HYBRIDS)],
)
async def test_they_are_so_with_recurrent_layers_whose_states_no_two_adapters_share(
    variant: str, num_ranks: int, tmp_path: Path
) -> None:
    made = Made(tmp_path, variant, HYBRIDS[variant])
    params = GREEDY.replace(prompt_logprobs=None)
    same = [(PROMPTS[1], name) for name in made.references if name != "few"]
    first = [*zip(PROMPTS, NAMES, strict=True)]
    rounds = await run(made, made.config(device={"tensor_parallel": num_ranks}), [first, same, same], params)
    asked = [*first, *same, *same]
    expected = [greedy(made.references[name], prompt, NUM_NEW) for prompt, name in asked]
    assert [said[0] for found in rounds for said in found] == expected
    assert len({*map(tuple, expected[-len(same) :])}) == len(same)
    # The first round has the prompt under one name.
    assert [[said[2] for said in found] for found in rounds[1:]] == [
        [36 if name == NAMES[1] else 0 for _, name in same],
        [36] * len(same),
    ]


async def test_the_same_prompt_under_two_adapters_and_none_shares_no_page(llama: Made) -> None:
    prompt = PROMPTS[1]
    params = GREEDY.replace(prompt_logprobs=None)
    names = ["plain", "few", "", "plain", "few", ""]
    rounds = await run(llama, llama.config(), [[(prompt, name)] for name in names], params)
    cached = [said[2] for (said,) in rounds]
    assert cached[:3] == [0, 0, 0]
    assert min(cached[3:]) >= 36
    for name, (said,) in zip(names, rounds, strict=True):
        assert said[0] == greedy(llama.references[name], prompt, NUM_NEW), name


@pytest.mark.skipif("avx2" not in instruction_sets(), reason="FBGEMM needs AVX2")
async def test_rounded_weights_get_the_same_adapters(llama: Made) -> None:
    """Rounding of the weights themselves changes little here; a lost adapter changes everything."""
    asked = [*zip(PROMPTS, NAMES, strict=True)]
    (together,) = await run(llama, llama.config(model={"quantization": "float16"}), [asked])
    for (prompt, name), said in zip(asked, together, strict=True):
        whole = torch.tensor([prompt + said[0]])
        with torch.inference_mode():
            scores = llama.references[name](whole).logits[0].log_softmax(-1)
        expected = scores[:-1].gather(1, whole[0, 1:, None])[:, 0]
        assert np.abs(np.array(said[1]) - expected.numpy()).max() < 0.1, name


@pytest.mark.slow
async def test_they_outlive_the_executor_that_held_them(llama: Made) -> None:
    """The process is killed in the middle of the streams; another one reads the adapters anew."""
    params = SamplingParams(temperature=0.0, max_tokens=90, ignore_eos=True)
    system = System(llama.config(placement={"executor": "process"}, kv={"num_pages": 512}))
    await system.start()
    try:
        adapters = llama.adapters(system)
        streams = [
            system.ingress.open(prompt, params, RequestOptions(parts=parts_of(adapters[name])))
            for prompt, name in zip(PROMPTS[:3], NAMES[:3], strict=True)
        ]
        first = [await stream.next() for stream in streams]
        send(signal.SIGKILL)
        rest = await asyncio.gather(*(stream.collect() for stream in streams))
        assert system.executors.num_restarts == 1
        whole = [one.token_ids + other.token_ids for one, other in zip(first, rest, strict=True)]
        texts = [np.frombuffer(ids, np.int32).tolist() for ids in whole]
    finally:
        await system.stop()
    for prompt, name, said in zip(PROMPTS[:3], NAMES[:3], texts, strict=True):
        assert said == greedy(llama.references[name], prompt, 90), name


@pytest.mark.parametrize("num_ranks", [1, 2])
async def test_an_adapter_that_is_gone_ends_its_request_alone(llama: Made, num_ranks: int) -> None:
    """The prompt is half computed: none of it is shared, and the ranks go on together."""
    system = System(llama.config(device={"tensor_parallel": num_ranks}))
    await system.start()
    try:
        params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
        gone = Adapter("0" * 64, str(llama.folder / "nowhere"))
        stays = system.ingress.open(PROMPTS[2], params, RequestOptions(parts=llama.adapters(system)["few"].parts))
        for _ in range(2):
            lost = system.ingress.open(PROMPTS[1], params, RequestOptions(parts=gone.parts))
            with pytest.raises(RequestError, match="can no longer be read") as found:
                await lost.collect()
            assert (found.value.status, found.value.code) == (500, "adapter_lost")
        said = np.frombuffer((await stays.collect()).token_ids, np.int32).tolist()
        assert said == greedy(llama.references["few"], PROMPTS[2], 30)
        assert system.executors.num_restarts == 0
        planner = system.monitor._scheduler.planner
        assert planner is not None
        assert Namespace(adapter=gone.digest) not in planner.pages.tree._roots
    finally:
        await system.stop()
