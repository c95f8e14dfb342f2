"""The visible text of a request: streamed or not, cut at the same place, with the same token count."""

from itertools import pairwise

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.types.params import SamplingParams
from tests.text.specimens import MAKERS
from tests.text.test_stops import reference

fixtures_are_read_only = settings(
    deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def run(codec, params, token_ids, cuts):
    stream = codec.open_stream([5], params)
    edges = [0, *sorted(cut % (len(token_ids) + 1) for cut in cuts), len(token_ids)]
    shown = [stream.push(token_ids[begin:end]) for begin, end in pairwise(edges)]
    return "".join(shown) + stream.finish(), stream.matched, stream.num_tokens


@pytest.mark.reliability("U2", "text cut into tokens and groups anywhere, also within a character or a stop string")
@pytest.mark.parametrize("kind", MAKERS)
@fixtures_are_read_only
@given(data=st.data())
def test_streamed_text_is_the_unstreamed_text_is_the_reference_cut(codecs_by_kind, kind, data):
    codec = codecs_by_kind[kind]
    token_ids = data.draw(st.lists(st.integers(0, codec.vocab_size), max_size=40))
    whole, _, _ = run(codec, SamplingParams(), token_ids, [])
    begins = st.integers(0, max(0, len(whole) - 1))
    stops = data.draw(
        st.lists(
            st.one_of(
                st.tuples(begins, st.integers(1, 6)).map(lambda at: whole[at[0] : at[0] + at[1]]),
                st.sampled_from(["\ufffd", " ", "the", "zz"]),
            ).filter(bool),
            max_size=3,
        )
    )
    include_stop = data.draw(st.booleans())
    cuts = data.draw(st.lists(st.integers(0, 40), max_size=15))
    params = SamplingParams(stop=tuple(stops), include_stop_str_in_output=include_stop)
    streamed = run(codec, params, token_ids, cuts)
    assert streamed == run(codec, params, token_ids, list(range(40)))
    assert streamed[:2] == reference(whole, stops, include_stop)


def test_a_stop_string_across_tokens_ends_at_the_token_that_completes_it(codecs_by_kind):
    codec = codecs_by_kind["byte_level"]
    token_ids = codec.encode("The quick brown fox jumps").tolist()
    stream = codec.open_stream([], SamplingParams(stop=("wn f",)))
    shown = "".join(stream.push([token_id]) for token_id in token_ids)
    assert shown + stream.finish() == "The quick bro"
    assert stream.matched == "wn f"
    completed = "".join(codec.decode(token_ids[: stream.num_tokens]))
    assert completed.startswith("The quick brown f")
    assert not codec.decode(token_ids[: stream.num_tokens - 1]).startswith("The quick brown f")


def test_tokens_after_the_stop_in_one_group_are_not_counted(codecs_by_kind):
    codec = codecs_by_kind["byte_level"]
    one_by_one, at_once = (codec.open_stream([], SamplingParams(stop=("quick",))) for _ in range(2))
    token_ids = codec.encode("The quick brown fox jumps").tolist()
    for token_id in token_ids:
        one_by_one.push([token_id])
    at_once.push(token_ids)
    assert one_by_one.num_tokens == at_once.num_tokens < len(token_ids)


def test_stop_strings_within_the_first_min_tokens_do_not_count(codecs_by_kind):
    codec = codecs_by_kind["byte_level"]
    token_ids = codec.encode("the the the the").tolist()
    text_of_two = codec.decode(token_ids[:2])
    stream = codec.open_stream([], SamplingParams(stop=("the",), min_tokens=2, max_tokens=9))
    shown = stream.push(token_ids) + stream.finish()
    assert stream.matched == "the"
    assert shown == "the the the the"[: "the the the the".index("the", len(text_of_two))]
    assert stream.num_tokens > 2


def test_a_replacement_character_flushed_at_the_end_can_be_the_stop(codecs_by_kind):
    codec = codecs_by_kind["byte_level"]
    half = codec.encode("🙂").tolist()[:1]
    stream = codec.open_stream([], SamplingParams(stop=("\ufffd",)))
    assert stream.push(half) + stream.finish() == ""
    assert stream.matched == "\ufffd"


def test_a_sequence_that_ends_shows_what_was_held_back(codecs_by_kind):
    codec = codecs_by_kind["byte_level"]
    stream = codec.open_stream([], SamplingParams(stop=("fox jumped",)))
    shown = stream.push(codec.encode("The fox jum").tolist())
    assert shown == "The "
    assert stream.finish() == "fox jum"
    assert stream.matched is None


def test_streams_share_nothing(codecs_by_kind):
    """A stream that is dropped in the middle of a character leaves nothing for the next one."""
    codec = codecs_by_kind["byte_level"]
    emoji = codec.encode("🙂").tolist()
    codec.open_stream([], SamplingParams(stop=("x",))).push(emoji[:-1])
    fresh = codec.open_stream([], SamplingParams(stop=("x",)))
    assert fresh.push(codec.encode("fox").tolist()) == "fo"


def test_a_tokens_own_text_and_bytes(codecs_by_kind):
    codec = codecs_by_kind["byte_level"]
    emoji = codec.encode("🙂").tolist()
    rendered = [codec.token_text(token_id, -0.5) for token_id in emoji]
    assert b"".join(token.utf8 for token in rendered) == "🙂".encode()
    assert rendered[0].logprob == -0.5
    assert rendered[0].token_id == emoji[0]
    assert codec.token_text(1, 0.0).text == "<s>"
    assert codec.token_text(codec.vocab_size + 7, 0.0).utf8 == b""
