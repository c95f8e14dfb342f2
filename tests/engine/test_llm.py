"""The offline API: text or token ids in, text and token ids out, in order, and nothing left behind."""

import itertools
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from callboard import LLM, SamplingParams
from engine import llm as llm_module
from engine.checkpoints.checkpoint import resolve_checkpoint
from engine.messages import Finish
from engine.text.turns import read_turn
from engine.types.errors import ConfigError, RequestError, WeightsError
from tests.pace import far
from tests.sampling.borders import clear_of_borders

GREEDY = SamplingParams(temperature=0.0, max_tokens=12)
DEMO = resolve_checkpoint("demo", "")


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(progress=False, config={"kv": {"num_pages": 256}, "limits": {"max_requests": 8}}) as llm:
        yield llm


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(DEMO / "tokenizer.json"))


def test_text_and_token_ids_are_the_same_prompt(llm: LLM, tokenizer: Tokenizer) -> None:
    text = "def add(a, b):\n"
    (from_text,) = llm.generate(text, GREEDY)
    (from_ids,) = llm.generate(tokenizer.encode(text).ids, GREEDY)
    assert from_text.token_ids == from_ids.token_ids
    assert from_text.text == from_ids.text
    assert from_text.usage.prompt_tokens == len(tokenizer.encode(text).ids)
    assert (from_text.finish_reason, len(from_text.token_ids)) == ("length", 12)


def test_many_prompts_come_back_in_order_past_the_admission_limit(llm: LLM) -> None:
    prompts = [f"x{number} = " for number in range(20)]
    params = [GREEDY.replace(max_tokens=1 + number % 7) for number in range(20)]
    completions = llm.generate(prompts, params)
    assert [completion.prompt for completion in completions] == prompts
    assert [len(completion.token_ids) for completion in completions] == [1 + number % 7 for number in range(20)]


def test_the_stream_concatenates_to_the_whole(llm: LLM) -> None:
    (whole,) = llm.generate("class ", GREEDY)
    deltas = list(llm.stream("class ", GREEDY))
    assert "".join(delta.text for delta in deltas) == whole.text
    ids = np.concatenate([np.frombuffer(delta.token_ids, dtype=np.int32) for delta in deltas])
    assert ids.tolist() == whole.token_ids
    assert deltas[-1].finish == Finish.LENGTH
    assert deltas[-1].usage == whole.usage


def test_chat_answers_and_streams_a_conversation(llm: LLM) -> None:
    turns = [{"role": "user", "content": "Write a function named add"}]
    (answer,) = llm.chat(turns, GREEDY)
    both = llm.chat([turns, turns], GREEDY)
    assert [one.text for one in both] == [answer.text] * 2
    assert "".join(delta.text for delta in llm.stream(turns, GREEDY)) == answer.text


def test_a_conversation_keeps_its_calls_its_thoughts_and_its_names(llm: LLM) -> None:
    function = {"name": "add", "arguments": '{"a": 1}'}
    turns = [
        {"role": "user", "content": "add one", "name": "Ann"},
        {"role": "assistant", "reasoning": "easy", "tool_calls": [{"id": "call_1", "function": function}]},
        {"role": "tool", "content": "2", "tool_call_id": "call_1"},
    ]
    (answer,) = llm.chat(turns, GREEDY)
    assert answer.prompt == tuple(map(read_turn, turns))


def test_leaving_a_stream_early_cancels_it(llm: LLM) -> None:
    stream = llm.stream("import ", GREEDY.replace(max_tokens=1500, ignore_eos=True))
    assert len(list(itertools.islice(stream, 3))) == 3
    stream.close()
    system = llm._system
    for _ in range(200):
        if not system.ingress.num_open and system.ingress.stats and not system.ingress.stats.pages_used:
            return
        threading.Event().wait(0.01)
    pytest.fail(f"pages are still held: {system.ingress.stats}")


def test_a_refused_prompt_is_one_error_and_the_engine_goes_on(llm: LLM) -> None:
    with pytest.raises(RequestError, match="temperature"):
        llm.generate(["a", "b"], [GREEDY, GREEDY.replace(temperature=-1.0)])
    with pytest.raises(RequestError, match="2 prompts but 1"):
        llm.generate(["a", "b"], [GREEDY])
    with pytest.raises(RequestError, match="valid Unicode"):
        llm.generate("\ud800", GREEDY)
    assert llm.generate("a", GREEDY)[0].token_ids


def test_logprobs_are_those_of_the_model(llm: LLM) -> None:
    (completion,) = llm.generate("import ", GREEDY.replace(logprobs=3))
    assert len(completion.logprobs) == 12
    for entry, token_id in zip(completion.logprobs, completion.token_ids, strict=True):
        assert entry.sampled.token_id == token_id == entry.top[0].token_id, "greedy takes the most likely one"
        values = [one.logprob for one in entry.top]
        assert values == sorted(values, reverse=True)
        assert len(values) == 3
    assert "".join(entry.sampled.text for entry in completion.logprobs) == completion.text


def test_a_seed_gives_the_same_text_in_any_company(llm: LLM) -> None:
    params = SamplingParams(temperature=0.9, top_p=0.95, top_k=50, seed=5, max_tokens=24)
    with clear_of_borders():
        (alone,) = llm.generate("def ", params)
    company = llm.generate(["def ", *(f"a{number}" for number in range(7))], params)
    assert company[0].text == alone.text
    (other,) = llm.generate("def ", params.replace(seed=6))
    assert other.text != alone.text


def test_closing_ends_every_thread_and_a_closed_llm_says_so() -> None:
    before = set(threading.enumerate())
    llm = LLM(progress=False, config={"kv": {"num_pages": 256}})
    llm.generate("a", GREEDY)
    llm.close()
    llm.close()
    assert set(threading.enumerate()) <= before
    with pytest.raises(RuntimeError, match="closed"):
        llm.generate("a", GREEDY)


def test_two_engines_live_in_one_process(llm: LLM) -> None:
    with LLM(progress=False, config={"kv": {"num_pages": 64, "page_size": 4}}) as other:
        assert other.generate("class ", GREEDY)[0].token_ids == llm.generate("class ", GREEDY)[0].token_ids


def test_mistakes_at_the_start_are_clear() -> None:
    with pytest.raises(ConfigError, match="page_sise"):
        LLM(config={"kv": {"page_sise": 1}})
    with pytest.raises(ConfigError, match=r"kv: Expected `object`"):
        LLM(config={"kv": 16})
    with pytest.raises(WeightsError, match="no/such/dir"):
        LLM("/no/such/dir")


def test_dummy_weights_need_only_a_config(tmp_path_factory: pytest.TempPathFactory) -> None:
    directory = tmp_path_factory.mktemp("dummy")
    (directory / "config.json").write_bytes((DEMO / "config.json").read_bytes())

    def tokens(seed: int) -> list[int]:
        with LLM(
            directory, progress=False, config={"model": {"load_format": "dummy"}, "device": {"seed": seed}}
        ) as llm:
            with pytest.raises(RequestError, match="token ids"):
                llm.generate("text", GREEDY)
            return llm.generate([1, 2, 3], GREEDY.replace(ignore_eos=True))[0].token_ids

    assert tokens(1) == tokens(1)
    assert tokens(1) != tokens(2)


@pytest.mark.slow
def test_a_script_that_forgets_to_close_still_ends() -> None:
    code = "from callboard import LLM; llm = LLM(progress=False); print(len(llm.generate('a')[0].token_ids) > 0)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=far(60), check=False)
    assert (result.returncode, result.stdout.strip()) == (0, "True"), result.stderr


def test_bars_are_for_terminals_and_for_several_prompts(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.llm.BAR_AFTER_S", 0.0)
    with LLM(config={"kv": {"num_pages": 256}}) as llm:
        llm.generate(["a", "b"], GREEDY)
        assert capfd.readouterr().err == "", "a file or a pipe"
        llm.generate(["a", "b"], GREEDY, progress=True)
        assert "generating" in capfd.readouterr().err
        llm.generate("a", GREEDY, progress=True)
        llm.generate([], GREEDY, progress=True)
        assert capfd.readouterr().err == ""


def test_loading_says_how_far_it_is(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.models.loader.SAY_EVERY_S", 0.0)
    with caplog.at_level("INFO", "engine.models.loader"), LLM(progress=False, config={"kv": {"num_pages": 256}}):
        pass
    read = [float(one.getMessage().split()[2]) for one in caplog.records if "MB of weights" in one.getMessage()]
    assert read == sorted(read)
    assert read[0] == 0
    assert len(read) > 10
    assert f"{read[-1]} of {read[-1]} MB" in caplog.text


def test_a_loop_whose_thread_begins_late_is_not_taken_for_a_closed_one(monkeypatch: pytest.MonkeyPatch) -> None:
    run = llm_module._run_loop

    def begin_late(*arguments: Any) -> None:
        time.sleep(0.1)
        run(*arguments)

    monkeypatch.setattr(llm_module, "_run_loop", begin_late)
    with LLM(progress=False) as llm:
        assert llm.generate("def f(", SamplingParams(max_tokens=2))[0].token_ids
    with pytest.raises(RuntimeError, match="closed"):
        llm.generate("def f(", SamplingParams(max_tokens=2))
