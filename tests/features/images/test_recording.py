"""A recording has no file of a picture, hides what follows from its content, and plans as the engine did."""

from pathlib import Path

import msgspec
import numpy as np

from engine.features.images.messages import EncodePicture, PictureEncoded, PictureFile
from engine.features.recording.file import read_recording
from engine.features.recording.privacy import Privacy
from engine.features.recording.replay import Replay
from engine.features.recording.turns import plan_digest
from engine.messages import Admit
from engine.text.pictures import FIRST_ID, NAME, PlacedPicture, picture_ids, placed_pictures
from engine.types.params import SamplingParams
from engine.types.prompt import RequestPart
from tests.features.recording.driver import Driver

KEY = "5e" * 32


def with_picture(*, request_id: int = 1, key: str = KEY) -> Admit:
    """A request with six places of a picture between other tokens."""
    ids = np.concatenate(([5, 7], picture_ids(key, 6), [7])).astype(np.int32)
    placed = PlacedPicture(key, b"file", np.arange(2, 8, dtype=np.int32).tobytes(), (1, 2, 3), False)
    part = RequestPart("", msgspec.msgpack.encode((placed,)))
    return Admit(request_id=request_id, token_ids=ids.tobytes(), params=SamplingParams(), parts={NAME: part})


def test_a_recording_has_no_pictures() -> None:
    admit = with_picture()
    ids = np.frombuffer(admit.token_ids, dtype=np.int32)
    privacy = Privacy(9, hashed=True)
    first, second = privacy.message(admit), privacy.message(admit)
    assert isinstance(first, Admit)
    assert first == second, "what is equal stays equal"
    found = np.frombuffer(first.token_ids, dtype=np.int32)
    assert ((found >= FIRST_ID) == (ids >= FIRST_ID)).all()
    assert not (found[2:8] == ids[2:8]).any()
    assert found[1] == found[8] < 9
    assert b"file" not in msgspec.msgpack.encode(first)
    (placed,) = placed_pictures(first.parts[NAME])
    assert placed.places_n.tolist() == [*range(2, 8)]
    assert KEY.encode() not in msgspec.msgpack.encode(first)
    assert len(placed.key) == len(KEY)
    # A reader that has the picture cannot recognize it by how its ids differ from each other.
    assert not (np.diff(found[2:8]) == np.diff(ids[2:8])).any()
    assert len({first ^ second for first, second in zip(found[2:8], ids[2:8], strict=True)}) == 6
    other = privacy.message(with_picture(key="ab" * 32))
    assert isinstance(other, Admit)
    assert placed_pictures(other.parts[NAME])[0].key != placed.key
    assert not (np.frombuffer(other.token_ids, dtype=np.int32)[2:8] == found[2:8]).any()


def test_a_whole_recording_has_the_ids_of_pictures_and_no_files() -> None:
    admit = with_picture()
    recorded = Privacy(9, hashed=False).message(admit)
    assert isinstance(recorded, Admit)
    assert recorded.token_ids == admit.token_ids
    (placed,) = placed_pictures(recorded.parts[NAME])
    assert (placed.key, placed.data) == (KEY, b"")


def test_a_recording_that_begins_with_a_picture_in_flight_plans_the_same_again(tmp_path: Path) -> None:
    driver = Driver(tmp_path, limit_bytes=10_000, found=(NAME,))
    driver.tell(with_picture(request_id=10**6), with_picture(request_id=10**6 + 1, key="ab" * 32))
    for number in range(2):
        driver.run(2)
        if not number:
            driver.tell(PictureEncoded().message(0, 0))
    driver.recorder.write("test")
    (path,) = driver.written()
    recording = read_recording(path)
    assert recording.state
    replay = Replay(recording)
    list(replay)
    assert replay.num_plans
    assert replay.digest == replay.recorded_digest


def test_a_replay_without_files_has_the_same_plans() -> None:
    plans = [EncodePicture(PictureFile("key", data, 6), ("old",)).message(3) for data in (b"", b"file")]
    assert plan_digest(plans[0]) == plan_digest(plans[1])
    other = EncodePicture(PictureFile("key", b"", 6)).message(3)
    assert plan_digest(other) != plan_digest(plans[0])
