"""Every message survives the wire, and nothing else is let in."""

import typing

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.actors import inboxes
from engine.actors.snapshot import RequestsFinished, Snapshot
from engine.messages import Delta, Deltas, Finish, Step, Stop, Tokens
from engine.settings.sections import LimitsSection
from engine.types.notices import Message
from engine.types.params import SamplingParams
from engine.types.prompt import ChatOptions, ChatTurn, ToolCall
from engine.workers.messages import AnyMessage, FromFrontend, FromTokenizer, FromWorker, ToFrontend
from engine.workers.wire import Wire, WireError

SHOWN = {Snapshot, RequestsFinished}  # of many parts; ``test_frontend_link.py`` sends them
TYPES = [kind for kind in typing.get_args(AnyMessage) if kind not in SHOWN]


def every_message() -> set[type]:
    unions = (
        inboxes.TokenizerInbox,
        inboxes.SchedulerInbox,
        inboxes.ExecutorInbox,
        inboxes.IngressInbox,
        FromWorker,
        FromTokenizer,
        FromFrontend,
        ToFrontend,
    )
    return {Stop, *(kind for union in unions for kind in typing.get_args(union))}


def test_the_wire_knows_every_message_of_every_inbox() -> None:
    assert every_message() == set(typing.get_args(AnyMessage))


def build_all_fields(kind: type[msgspec.Struct]) -> st.SearchStrategy[msgspec.Struct]:
    """Every field drawn from its annotation; left to itself, hypothesis would pass msgspec's default factories."""
    return st.builds(kind, **{name: st.from_type(hint) for name, hint in typing.get_type_hints(kind).items()})


for struct in (*Message.__subclasses__(), SamplingParams, ChatOptions, ChatTurn, ToolCall):
    st.register_type_strategy(struct, build_all_fields)
# msgpack has 64-bit integers; NaN is unequal to itself.
st.register_type_strategy(LimitsSection, st.just(LimitsSection()))  # its numbers have bounds of their own
st.register_type_strategy(int, st.integers(-(2**63), 2**63 - 1))
st.register_type_strategy(float, st.floats(allow_nan=False))


@pytest.mark.reliability("U6", "frames between actors: any message, cut, oversized, of a wrong tag or type, random")
@pytest.mark.parametrize("kind", TYPES, ids=lambda kind: kind.__name__)
@settings(max_examples=30)
@given(data=st.data())
def test_every_message_round_trips(kind: type[Message], data: st.DataObject) -> None:
    message = data.draw(st.from_type(kind))
    wire = Wire("test")
    assert wire.decode(wire.encode(message)) == message


@pytest.mark.reliability("U6", "frames between actors: any message, cut, oversized, of a wrong tag or type, random")
def test_a_frame_over_the_limit_is_refused_on_both_sides() -> None:
    message = Tokens(request_ids=bytes(100), token_ids=b"", finishes=b"")
    frame = Wire("big").encode(message)
    small = Wire("small", max_frame_bytes=50)
    with pytest.raises(WireError, match="link small: Tokens of"):
        small.encode(message)
    with pytest.raises(WireError, match="link small: frame of"):
        small.decode(frame)


@pytest.mark.reliability("U6", "frames between actors: any message, cut, oversized, of a wrong tag or type, random")
def test_a_frame_cut_anywhere_is_refused_with_the_links_name() -> None:
    wire = Wire("scheduler-executor0")
    frame = wire.encode(Deltas(deltas=(Delta(request_id=1, text="text", token_ids=bytes(8), finish=Finish.STOP),)))
    for length in range(len(frame)):
        with pytest.raises(WireError, match="scheduler-executor0"):
            wire.decode(frame[:length])


@pytest.mark.reliability("U6", "frames between actors: any message, cut, oversized, of a wrong tag or type, random")
@given(st.binary(max_size=200))
def test_random_bytes_raise_wire_errors_only(frame: bytes) -> None:
    wire = Wire("test")
    try:
        message = wire.decode(frame)
    except WireError:
        return
    assert isinstance(message, TYPES)


@pytest.mark.reliability("U6", "frames between actors: any message, cut, oversized, of a wrong tag or type, random")
@pytest.mark.parametrize(
    "value", [["Nonsense", 1], ["Step", "seven"], ["Step", -1.5], {"step_id": 1}, 7, None, [[[[]]]]]
)
def test_an_unknown_tag_or_a_wrong_type_is_refused(value: object) -> None:
    with pytest.raises(WireError, match="not a message"):
        Wire("test").decode(msgspec.msgpack.encode(value))


@pytest.mark.reliability("U6", "frames between actors: any message, cut, oversized, of a wrong tag or type, random")
def test_deep_nesting_is_refused() -> None:
    with pytest.raises(WireError):
        Wire("test").decode(b"\x91" * 100_000)


def test_a_steady_decode_step_is_small() -> None:
    """Columns, not objects: 256 decoding rows cost little more than their 1,024 bytes of row numbers."""
    assert len(Wire("test").encode(Step(step_id=1, decode_rows=bytes(4 * 256)))) < 1100
