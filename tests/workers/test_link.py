"""Links between processes: messages get through in order, anything else is refused by name, and the link goes on."""

import asyncio
import logging
import os
import socket
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.messages import Step, StepDone, Stop
from engine.workers.link import MAX_LOGGED_REFUSALS, LinkError
from engine.workers.messages import WorkerAlive, WorkerReady
from engine.workers.wire import Wire, WireError
from tests.workers.conftest import Pair

GOOD = Wire("test").encode(WorkerAlive(waiting=0))


async def test_messages_pass_in_order_both_ways(pair: Pair) -> None:
    other, arrived = pair.connect()
    other.put(WorkerReady(num_pages=7))
    await pair.wait_for(lambda: len(pair.messages) == 1)
    for step_id in range(200):
        pair.link.put(Step(step_id=step_id, decode_rows=bytes(4 * step_id)))
        other.put(StepDone(rank=0, step_id=step_id, token_ids=bytes(step_id)))
        if step_id % 4 == 0:
            await pair.wait_for(lambda: len(arrived) == step_id + 1 == len(pair.messages) - 1)  # noqa: B023
    await pair.wait_for(lambda: len(arrived) == 200 == len(pair.messages) - 1)
    assert [step.step_id for step in arrived] == list(range(200))
    assert [done.step_id for done in pair.messages[1:]] == list(range(200))
    assert arrived[9] == Step(step_id=9, decode_rows=bytes(36))
    other.close()


@pytest.mark.reliability("P14", "frames cut short, mistyped, of an unknown tag, nested, over the limit")
@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"\x00",
        GOOD[:-1],
        GOOD + b"\x00",
        msgspec.msgpack.encode(["Nonsense", 1]),
        msgspec.msgpack.encode(["WorkerAlive", "zero"]),
        msgspec.msgpack.encode({"step_id": 1}),
        Wire("test").encode(Step(step_id=1)),  # a message, but not one that an executor says
        Wire("test").encode(Stop()),
        b"\x91" * 1000,
        bytes(1 << 16) + b"\x00",  # over the link's limit
    ],
    ids=["empty", "one byte", "cut short", "too long by one", "tag", "type", "map", "step", "stop", "nesting", "size"],
)
async def test_what_is_no_message_of_the_link_is_refused_by_name(
    pair: Pair, frame: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        pair.bare.connect(pair.endpoint)
        for sent in (GOOD, frame, GOOD):
            pair.bare.send(sent)
        await pair.wait_for(lambda: len(pair.messages) == 2)
        assert pair.link.num_refused == 1
    (record,) = [one for one in caplog.records if one.name == "engine.workers.link"]
    assert record.getMessage().startswith("link executor0: refused: ")


@pytest.mark.reliability("P14", "frames cut short, mistyped, of an unknown tag, nested, over the limit")
async def test_a_message_in_several_frames_is_refused(pair: Pair) -> None:
    pair.bare.connect(pair.endpoint)
    pair.bare.send_multipart([GOOD, GOOD, GOOD])
    pair.bare.send(GOOD)
    await pair.wait_for(lambda: bool(pair.messages))
    assert (len(pair.messages), pair.link.num_refused) == (1, 1)


@pytest.mark.reliability("P14", "a frame far over the limit")
async def test_a_frame_far_over_the_limit_costs_its_sender_the_connection_and_nobody_the_memory(pair: Pair) -> None:
    pair.bare.connect(pair.endpoint)
    pair.bare.send(GOOD)
    await pair.wait_for(lambda: len(pair.messages) == 1)
    events = pair.bare.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    pair.bare.send(bytes(1 << 20))
    await pair.wait_for(lambda: bool(events.poll(0)))
    pair.bare.disable_monitor()
    events.close()
    assert (len(pair.messages), pair.link.num_refused) == (1, 0)


@pytest.mark.reliability("P14", "bytes that are no ZeroMQ, half greetings, lengths of 2**32")
async def test_bytes_that_are_no_zeromq_do_not_disturb_the_one_who_speaks_it(pair: Pair) -> None:
    path = pair.endpoint.removeprefix("ipc://")
    signature, huge = b"\xff" + bytes(8) + b"\x7f", (2**32 - 1).to_bytes(8, "big")
    greetings = [signature + b"\x03" + bytes(21), b"GET / HTTP/1.1\r\n\r\n", b"\xff" + huge + b"\x7f", b"\xff", b""]
    vandals = []
    for greeting in greetings:
        vandal = socket.socket(socket.AF_UNIX)
        vandal.connect(path)
        vandal.sendall(greeting)
        vandals.append(vandal)
    other, arrived = pair.connect()
    other.put(WorkerAlive(waiting=0))
    await pair.wait_for(lambda: len(pair.messages) == 1)
    pair.link.put(Step(step_id=1))
    await pair.wait_for(lambda: len(arrived) == 1)
    for vandal in vandals:
        vandal.close()
    other.close()


async def test_a_second_peer_is_not_listened_to(pair: Pair) -> None:
    other, arrived = pair.connect()
    other.put(WorkerAlive(waiting=0))
    await pair.wait_for(lambda: len(pair.messages) == 1)
    pair.bare.connect(pair.endpoint)
    pair.bare.send(Wire("test").encode(WorkerReady(num_pages=1)))
    other.put(WorkerAlive(waiting=1))
    await pair.wait_for(lambda: len(pair.messages) == 2)
    pair.link.put(Step(step_id=1))
    await pair.wait_for(lambda: len(arrived) == 1)
    assert pair.messages == [WorkerAlive(waiting=0), WorkerAlive(waiting=1)]
    other.close()


async def test_a_peer_that_reads_nothing_is_an_error_and_not_a_growing_heap(pair: Pair) -> None:
    pair.bare.rcvhwm = 1
    pair.bare.connect(pair.endpoint)
    pair.bare.send(GOOD)
    await pair.wait_for(lambda: bool(pair.messages))
    with pytest.raises(LinkError, match="link executor0: Step cannot be sent"):
        for step_id in range(100_000):
            pair.link.put(Step(step_id=step_id, decode_rows=bytes(40_000)))


async def test_nobody_at_the_other_end_is_an_error(pair: Pair) -> None:
    with pytest.raises(LinkError, match="executor0"):
        pair.link.put(Step(step_id=0))
    with pytest.raises(WireError, match="Step of"):
        pair.link.put(Step(step_id=0, decode_rows=bytes(1 << 17)))


async def test_refusals_are_logged_only_so_often_and_counted_on(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        pair.bare.connect(pair.endpoint)
        pair.bare.sndhwm = 0
        for _ in range(100):
            pair.bare.send(b"\xffrefuse me\n")
            await asyncio.sleep(0)
        await pair.wait_for(lambda: pair.link.num_refused == 100)
    assert len([one for one in caplog.records if one.name == "engine.workers.link"]) == MAX_LOGGED_REFUSALS
    assert all("\n" not in record.getMessage() for record in caplog.records)


def mutated(frame: bytes, changes: list[tuple[int, int]], cut: int) -> bytes:
    """A frame with some bytes changed and the end cut off."""
    raw = bytearray(frame)
    for at, value in changes:
        raw[at % len(raw)] = value
    return bytes(raw[: len(raw) - cut % len(raw)])


FRAMES = st.one_of(
    st.binary(max_size=300),
    st.builds(
        mutated,
        st.sampled_from(
            [
                Wire("t").encode(one)
                for one in (StepDone(rank=0, step_id=3, token_ids=bytes(8)), WorkerReady(num_pages=9), Step(step_id=1))
            ]
        ),
        st.lists(st.tuples(st.integers(0, 40), st.integers(0, 255)), max_size=3),
        st.integers(0, 30),
    ),
)


@pytest.mark.reliability("P14", "random frames")
@settings(max_examples=60, deadline=None)
@given(batches=st.lists(st.lists(FRAMES, max_size=6), max_size=4))
async def test_whatever_is_sent_the_next_message_arrives(
    tmp_path_factory: pytest.TempPathFactory, batches: list
) -> None:
    base = tmp_path_factory.mktemp("sockets")
    base.chmod(0o700)

    logging.disable(logging.WARNING)
    pair = Pair(base, capacity=100)
    try:
        pair.bare.connect(pair.endpoint)
        sent = 0
        for number, batch in enumerate(batches):
            for frame in batch:
                pair.bare.send(frame)
            pair.bare.send(Wire("t").encode(StepDone(rank=0, step_id=1_000_000 + number, token_ids=b"")))
            sent += len(batch) + 1
            await pair.wait_for(lambda: len(pair.messages) + pair.link.num_refused == sent)  # noqa: B023
            assert pair.messages[-1] == StepDone(rank=0, step_id=1_000_000 + number, token_ids=b"")
    finally:
        pair.close()
        logging.disable(logging.NOTSET)


@pytest.mark.reliability("P14", "another user's process")
@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
async def test_another_users_process_is_refused_by_the_kernels_word(pair: Pair, folder: Path) -> None:
    path = Path(pair.endpoint.removeprefix("ipc://"))
    assert path.stat().st_mode & 0o777 == 0o600
    # As if every permission on the way had been lost.
    opened = [folder, pair.directory.path, path]
    above = folder
    while (above := above.parent).stat().st_mode & 0o005 == 0:
        opened.append(above)
    modes = {one: one.stat().st_mode for one in opened}
    try:
        for one in opened:
            one.chmod(0o777)
        code = (
            "import os, sys, zmq; os.setuid(65534); context = zmq.Context(); link = context.socket(zmq.PAIR);"
            "own, secret, server, link_to = sys.argv[1:];"
            "link.curve_publickey, link.curve_secretkey, link.curve_serverkey = own.encode(), secret.encode(),"
            "server.encode();"
            "events = link.get_monitor_socket(zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED);"
            "link.connect(link_to); print(events.poll(3000) and events.recv_multipart()[0].hex());"
            "context.destroy(linger=0)"
        )
        keys = pair.keys
        arguments = [sys.executable, "-c", code, keys.own.public, keys.own.secret, keys.server, pair.endpoint]
        ended = await asyncio.to_thread(subprocess.run, arguments, capture_output=True, text=True)
    finally:
        for one, mode in modes.items():
            one.chmod(mode)
    disconnected = int(zmq.EVENT_DISCONNECTED).to_bytes(2, "little").hex()
    assert ended.stdout.startswith(disconnected), (ended.stdout, ended.stderr)
    assert not pair.messages
