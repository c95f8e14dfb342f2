"""Encoding agrees with transformers; broken files and broken prompts are named."""

import json
import subprocess
import sys
import threading
import time

import pytest
from transformers import PreTrainedTokenizerFast

from engine.text.codec import TextCodec
from engine.types.errors import RequestError, WeightsError
from engine.types.params import SamplingParams
from engine.types.prompt import ChatTurn
from tests.text.specimens import MAKERS, byte_level, codec, save

TEXTS = ["The quick brown fox", " leading", "Zoë 🙂 你好", "<s>named</s> tokens"]


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize(
    "config",
    [
        {},
        {"add_bos_token": True, "bos_token": "<s>", "eos_token": "</s>"},
        {"add_bos_token": False, "bos_token": "<s>"},
        {"add_bos_token": True, "add_eos_token": True, "bos_token": {"content": "<s>"}, "eos_token": "</s>"},
        {"add_eos_token": True, "eos_token": "</s>", "model_max_length": 1000000000000000019884624838656},
    ],
    ids=["plain", "bos", "no bos", "bos and eos", "eos"],
)
def test_encoding_agrees_with_transformers(tokenizers_by_kind, tmp_path, kind, config):
    # transformers only reads tables of token properties that say what they are.
    theirs_config = {
        key: {**value, "__type": "AddedToken"} if isinstance(value, dict) else value for key, value in config.items()
    }
    ours = codec(tokenizers_by_kind[kind], tmp_path / "ours", **config)
    theirs = PreTrainedTokenizerFast.from_pretrained(
        save(tokenizers_by_kind[kind], tmp_path / "theirs", **theirs_config)
    )
    for text in TEXTS:
        assert ours.encode(text).tolist() == theirs(text)["input_ids"]
    assert ours.vocab_size >= len(theirs)


def test_tokens_that_only_the_configuration_names_are_added(tmp_path):
    tokenizer = byte_level()
    new_id = tokenizer.get_vocab_size()
    extra = {str(new_id): {"content": "<|end|>", "special": True, "normalized": False}}
    ours = codec(tokenizer, tmp_path / "a", added_tokens_decoder=extra)
    assert ours.encode("<|end|>").tolist() == [new_id]
    assert ours.decode([new_id]) == ""
    theirs = PreTrainedTokenizerFast.from_pretrained(save(tokenizer, tmp_path / "b", added_tokens_decoder=extra))
    assert theirs("<|end|> fox")["input_ids"] == ours.encode("<|end|> fox").tolist()


def test_a_token_named_in_the_configuration_becomes_special(tmp_path):
    tokenizer = byte_level()
    token_id = tokenizer.token_to_id("x")
    assert codec(tokenizer, tmp_path / "plain").decode([token_id]) == "x"
    assert codec(tokenizer, tmp_path / "named", eos_token="x").decode([token_id]) == ""


def test_a_token_declared_at_another_id_is_an_error(tmp_path):
    directory = save(byte_level(), tmp_path, added_tokens_decoder={"7": {"content": "<|end|>", "special": True}})
    with pytest.raises(WeightsError, match=r"tokenizer_config\.json: declares token '<\|end\|>' as 7"):
        TextCodec.load(directory)


def test_an_older_checkpoint_names_its_tokens_in_a_file_of_their_own(tmp_path):
    directory = save(byte_level(), tmp_path, chat_template="{{ bos_token }}{{ eos_token }}", eos_token="</s>")
    (directory / "special_tokens_map.json").write_text('{"bos_token": {"content": "<s>"}, "eos_token": "x"}')
    assert TextCodec.load(directory).encode_chat([ChatTurn("user", "")]).token_ids.tolist() == [1, 2]


def test_limits_of_the_training_data_do_not_cut_prompts(tmp_path):
    tokenizer = byte_level()
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=64)
    assert len(codec(tokenizer, tmp_path).encode("one two three four five six")) not in (4, 64)


def test_missing_and_broken_files_are_named(tmp_path):
    with pytest.raises(WeightsError, match=r"tokenizer\.json: no such file"):
        TextCodec.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(WeightsError, match=r"tokenizer\.json: not valid"):
        TextCodec.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"model": {}}')
    with pytest.raises(WeightsError, match=r"tokenizer\.json: not a tokenizer"):
        TextCodec.load(tmp_path)
    save(byte_level(), tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("[]")
    with pytest.raises(WeightsError, match=r"tokenizer_config\.json: not valid"):
        TextCodec.load(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"added_tokens_decoder": {"5": {"special": true}}}')
    with pytest.raises(WeightsError, match=r"tokenizer_config\.json: not valid: .*content.*added_tokens_decoder"):
        TextCodec.load(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{}")
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(WeightsError, match=r"chat_template\.jinja: not UTF-8 at byte 0"):
        TextCodec.load(tmp_path)


@pytest.mark.parametrize("decoder", [{"type": "CTC"}, {"type": "Strip", "content": " ", "start": 0, "stop": 1}])
def test_a_decoder_that_cannot_be_streamed_is_an_error(tmp_path, decoder):
    directory = save(byte_level(), tmp_path)
    table = json.loads((directory / "tokenizer.json").read_text())
    ctc = {"type": "CTC", "pad_token": "<pad>", "word_delimiter_token": "|", "cleanup": True}
    table["decoder"] = ctc if decoder["type"] == "CTC" else decoder
    (directory / "tokenizer.json").write_text(json.dumps(table))
    with pytest.raises(WeightsError, match=f"cannot stream the decoder.*{decoder['type']}"):
        TextCodec.load(directory)


def test_an_empty_prompt_is_refused_where_no_token_comes_of_it(codecs_by_kind):
    with pytest.raises(RequestError, match="prompt: empty") as refusal:
        codecs_by_kind["byte_level"].encode("")
    assert (refusal.value.status, refusal.value.param) == (400, "prompt")
    assert codecs_by_kind["llama2"].encode("").tolist() == [1]  # its BOS


def test_a_lone_surrogate_is_refused(codecs_by_kind):
    with pytest.raises(RequestError, match="not valid Unicode"):
        codecs_by_kind["byte_level"].encode("a\ud800b")


def test_a_model_without_tokenizer_takes_ids_only():
    ours = TextCodec.without_tokenizer()
    with pytest.raises(RequestError, match="no tokenizer"):
        ours.encode("text")
    with pytest.raises(RequestError, match="no chat template"):
        ours.encode_chat([ChatTurn("user", "text")])
    stream = ours.open_stream([1, 2], SamplingParams(stop=("x",)))
    assert stream.push([5, 6]) + stream.finish() == ""
    assert stream.num_tokens == 2
    assert ours.decode([1, 2]) == ""
    assert ours.token_text(3, -1.0).utf8 == b""


def test_encoding_in_a_thread_lets_other_threads_run(codecs_by_kind):
    """The library's ``encode`` would hold the interpreter from the first byte to the last."""
    ours = codecs_by_kind["byte_level"]
    text = "a" * 100_000
    worker = threading.Thread(target=ours.encode, args=(text,))
    num_turns = 0
    worker.start()
    while worker.is_alive():
        time.sleep(0.001)
        num_turns += 1
    assert num_turns > 5


def test_text_needs_no_torch():
    program = "import sys, engine.text.codec; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
