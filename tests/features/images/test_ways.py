"""Pictures in every way to serve: tokens stay those of transformers, and what is not served says so."""

import shutil
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import transformers
from safetensors.torch import load_file, save_file
from transformers.modeling_utils import PreTrainedModel

from engine.checkpoints.fields import read_fields
from engine.features.lora.files import NAME as LORA
from engine.features.lora.files import AdapterRules, read_adapter
from engine.messages import Delta, RequestOptions
from engine.plugins.encoder.transformers import TransformersEncoder
from engine.text.turns import read_turn
from engine.types.errors import RequestError
from tests.features.images import made
from tests.features.images.served import ONE, THREE, chat, checkpoint, encoded, engine, expected, message, params
from tests.features.lora.made import make_adapter
from tests.workers.executors import send

NAME = "qwen2_5_vl"
NUM = 24
EIGHT = [message(THREE), message(ONE)] * 4


def of_eight(folder: Path, name: str = NAME) -> list[list[int]]:
    """The tokens of transformers for ``EIGHT``."""
    return [expected(name, folder, THREE, NUM), expected(name, folder, ONE, NUM)] * 4


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen2_5_vl", "gemma3"])
def test_rows_that_lose_their_pages_go_on_with_their_pictures(name: str, folder: Path) -> None:
    for _ in range(10):  # which rows run together depends on when they arrive
        with engine(checkpoint(name, folder), kv={"page_size": 4, "num_pages": 62}) as llm:
            planner = llm._system.scheduler._planned
            llm.generate([[3]] * 40, params(2))  # outputs look short, so many are let in
            assert [one.token_ids for one in chat(llm, EIGHT, NUM)] == of_eight(folder, name)
        if planner.meter.num_retractions:
            break
    assert planner.meter.num_retractions


@pytest.mark.slow
def test_pictures_are_encoded_again_after_a_crash(folder: Path) -> None:
    with engine(checkpoint(NAME, folder), placement={"executor": "process"}) as llm:
        stream = llm.stream([message(THREE)], params(NUM))
        tokens = [next(stream).token_ids]
        send(signal.SIGKILL)
        tokens += [delta.token_ids for delta in stream]
        assert np.frombuffer(b"".join(tokens), dtype=np.int32).tolist() == expected(NAME, folder, THREE, NUM)
        assert encoded(llm) == 6


@pytest.mark.slow
@pytest.mark.parametrize(
    "tables",
    [
        {"device": {"tensor_parallel": 2, "threads": 1, "kind": "cpu"}},
        {"plugins": {"proposer": "ngram"}},
        {"kv": {"page_size": 4, "num_pages": 80, "num_host_pages": 200}},
        {"images": {"cache_tokens": 20}},
        {"plugins": {"policy": "lpm"}, "scheduler": {"max_running": 2, "prefill_chunk": 5}},
    ],
    ids=["two ranks", "speculation", "host tier", "a small cache", "lpm"],
)
def test_eight_conversations_at_once(tables: dict[str, Any], folder: Path) -> None:
    with engine(checkpoint(NAME, folder), **tables) as llm:
        for _ in range(2):
            assert [one.token_ids for one in chat(llm, EIGHT, NUM)] == of_eight(folder)


@pytest.mark.slow
def test_encoders_that_load_at_once_leave_the_classes_of_transformers_as_they_were(folder: Path) -> None:
    # A Python program shares transformers with its engine.
    before = PreTrainedModel.tie_weights
    directory = checkpoint("llava", folder)
    encoder = TransformersEncoder(directory, read_fields(directory / "config.json").table)
    with ThreadPoolExecutor(4) as pool:
        for tower in [pool.submit(encoder.tower, "cpu", "float32") for _ in range(16)]:
            assert tower.result().nbytes
    assert PreTrainedModel.tie_weights is before


@pytest.mark.slow
def test_invariant_numerics_give_the_same_bits_in_every_way(folder: Path) -> None:
    found = set()
    for tables in ({}, {"scheduler": {"prefill_chunk": 5, "max_running": 2}}, {"images": {"cache_tokens": 20}}):
        config = {"model": {"dtype": "float32", "numerics": "invariant"}, "device": {"threads": 1}} | tables
        with engine(checkpoint("qwen3_vl", folder), **config) as llm:
            outputs = llm.chat([[one] for one in EIGHT], params(NUM).replace(logprobs=2))
            found.add(repr([one.logprobs for one in outputs]))
    assert len(found) == 1


def test_what_is_not_served_says_so(folder: Path) -> None:
    with engine(checkpoint("llava", folder), images={"cache_tokens": 20}) as llm:
        for refused, options, reason in (
            ([message(THREE)], params(4), "the pictures of this request have 48 tokens, and images.cache_tokens=20"),
            (
                [message(ONE)],
                params(4).replace(prompt_logprobs=1),
                "a prompt with pictures generates text, without prompt_logprobs",
            ),
            ([message(ONE, "an <image>")], params(4), "writes '<image>' 2 times for 1 pictures"),
            ([message(()) | {"content": [{"type": "image", "image": b"no"}]}], params(4), "cannot be read"),
        ):
            with pytest.raises(RequestError, match=reason.replace("(", r"\(")):
                llm.chat(refused, options)
        for cut in (RequestOptions(keep_last=40), RequestOptions(truncate_to=40)):
            with pytest.raises(RequestError, match="a conversation with pictures is not cut"):
                llm._system.ingress.open((read_turn(message(ONE)),), params(4), cut)
        assert chat(llm, [message(())])[0].token_ids
    with (
        engine(checkpoint("llava", folder), plugins={"encoder": "none"}) as llm,
        pytest.raises(RequestError, match="this model takes no pictures"),
    ):
        chat(llm, [message(ONE)])


def test_a_picture_of_low_detail_is_another_one_with_fewer_tokens(folder: Path) -> None:
    plain, low = message(((120, 80),)), message(((120, 80),))
    low["content"][1]["detail"] = "low"
    with engine(checkpoint("smolvlm", folder)) as llm:
        usual, fewer, again = chat(llm, [plain, low, low])
        assert encoded(llm) == 2
    assert fewer.usage.prompt_tokens < usual.usage.prompt_tokens
    assert again.token_ids == fewer.token_ids != usual.token_ids
    with pytest.raises(RequestError, match="the detail of a picture must be one of auto, low, high, not 'lowest'"):
        read_turn({"role": "user", "content": [{"type": "image", "image": made.picture(9, 9), "detail": "lowest"}]})


def test_a_configuration_that_drafts_by_a_model_takes_text_alone(folder: Path) -> None:
    directory = checkpoint("llava", folder)
    options = {"proposer.draft_model": {"path": str(directory)}}
    with engine(directory, plugins={"proposer": "draft_model", "options": options}) as llm:
        with pytest.raises(RequestError, match=r"plugins\.proposer='draft_model' drafts for texts alone"):
            chat(llm, [message(ONE)])
        assert chat(llm, [message(())])[0].token_ids


def test_pages_of_one_token_take_text_alone(folder: Path) -> None:
    with engine(checkpoint("llava", folder), kv={"page_size": 1, "num_pages": 400}) as llm:
        with pytest.raises(RequestError, match=r"kv\.page_size=1, and pages with pictures have at least 4 tokens"):
            chat(llm, [message(ONE)])
        assert chat(llm, [message(())], 2)[0].token_ids


def test_a_broken_picture_ends_its_own_request_alone(folder: Path) -> None:
    broken = message(ONE)
    broken["content"][1]["image"] = made.picture(*ONE[0])[:-400]
    with engine(checkpoint("llava", folder)) as llm:
        with pytest.raises(RequestError, match="a picture cannot be read"):
            chat(llm, [broken])
        assert chat(llm, [message(ONE)])[0].token_ids == expected("llava", folder, ONE, 16)


def with_adapter(directory: Path, adapter: Path, made_into: Path) -> Path:
    """The checkpoint with an adapter's products in the weights of its language model."""
    shutil.copytree(directory, made_into)
    path, deltas = made_into / "model.safetensors", load_file(adapter / "adapter_model.safetensors")
    weights = load_file(path)
    for name in [name for name in deltas if ".lora_A." in name]:
        module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        weights[f"{module}.weight"] += 2.0 * deltas[name.replace("lora_A", "lora_B")] @ deltas[name]
    save_file(weights, path, metadata={"format": "pt"})
    return made_into


@pytest.mark.slow
def test_adapters_change_the_language_model_alone(folder: Path) -> None:
    directory = checkpoint(NAME, folder)
    text = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**made.TEXT))
    adapter = make_adapter(folder / "adapters" / "one", text, 1)
    merged = with_adapter(directory, adapter, folder / "merged")
    adapted = expected(NAME, folder, THREE, NUM, merged)
    plain = expected(NAME, folder, THREE, NUM)
    assert adapted != plain
    with engine(directory, lora={"folder": str(folder / "adapters"), "max_rank": 8}) as llm:
        parts = read_adapter(adapter, msgspec.msgpack.decode(llm._system.engine.facts[LORA], type=AdapterRules)).parts
        turns = (read_turn(message(THREE)),)
        options = [RequestOptions(parts=parts), RequestOptions(), RequestOptions(parts=parts)]

        async def answers() -> list[Delta]:
            streams = [llm._system.ingress.open(turns, params(NUM), one) for one in options]
            return [await stream.collect() for stream in streams]

        found = [np.frombuffer(one.token_ids, dtype=np.int32).tolist() for one in llm._await(answers())]
    assert found == [adapted, plain, adapted]
