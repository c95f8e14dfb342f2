"""Single tokens as bytes: every kind of decoder, as its own library reads it."""

import json

import pytest
from tokenizers import Tokenizer, decoders, models

from engine.text.codec import Detokenizer
from engine.text.vocabulary import Vocabulary
from engine.types.errors import WeightsError
from tests.text.specimens import MAKERS


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("skip", [True, False])
def test_every_token_alone_reads_as_the_tokenizer_reads_it(tokenizers_by_kind, codecs_by_kind, kind, skip):
    tokenizer, codec = tokenizers_by_kind[kind], codecs_by_kind[kind]
    for token_id in range(codec.vocab_size):
        assert codec.decode([token_id], skip_special_tokens=skip) == tokenizer.decode(
            [token_id], skip_special_tokens=skip
        )


def test_metaspace_loses_every_mark_that_begins_a_text():
    tokens = ["▁▁▁a", "▁b", "▁"]
    tokenizer = Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, []))
    for scheme in ("always", "first", "never"):
        tokenizer.decoder = decoders.Metaspace(prepend_scheme=scheme)
        vocabulary = Vocabulary.read(tokenizer, json.loads(tokenizer.to_str())["decoder"])
        for token_ids in ([0, 1], [1, 0], [2, 0], [2, 2, 1]):
            detokenizer = Detokenizer(vocabulary, skip_special_tokens=True)
            assert detokenizer.push(token_ids) == tokenizer.decode(token_ids), (scheme, token_ids)


def test_ids_that_no_token_has_are_empty():
    vocabulary = Vocabulary([b"a", b"", b"c"], special_ids=[2])
    assert [vocabulary.piece(token_id) for token_id in (-1, 0, 1, 2, 3)] == [b"", b"a", b"", b"c", b""]
    assert vocabulary.visible_pieces == [b"a", b"", b""]


def test_an_unknown_decoder_is_refused():
    with pytest.raises(WeightsError, match="cannot stream the decoder"):
        Vocabulary.read(Tokenizer(models.BPE()), {"type": "Replace", "pattern": {"Regex": "a+"}, "content": "b"})
