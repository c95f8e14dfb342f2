"""What is said at start about a tokenizer that does not fit the model."""

import pytest

from engine.text.codec import TextCodec, warn_of_unknown_tokens


def test_tokens_without_an_embedding_are_counted_and_named(codecs_by_kind, caplog):
    codec: TextCodec = codecs_by_kind["words"]
    warn_of_unknown_tokens(codec, codec.vocab_size)
    warn_of_unknown_tokens(TextCodec.without_tokenizer(), 3)
    assert not caplog.records
    warn_of_unknown_tokens(codec, 3)
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert record.getMessage().startswith(
        "2 tokens of the tokenizer have no embedding in the model, which ends at id 2; "
    )
    assert record.getMessage().endswith("the first: ' one', ' two'")


def test_of_many_tokens_without_an_embedding_the_first_are_named(codecs_by_kind, caplog: pytest.LogCaptureFixture):
    codec = codecs_by_kind["llama2"]
    warn_of_unknown_tokens(codec, 3)
    message = caplog.records[0].getMessage()
    assert message.startswith(f"{codec.vocab_size - 3} tokens ")
    assert len(message) < 300
