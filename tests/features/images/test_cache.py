"""The planner's account of encoded pictures: which requests need which, and what goes first."""

import numpy as np

from engine.features.images.cache import PictureCache
from engine.text.pictures import FIRST_ID, PlacedPicture, picture_ids


def placed(key: str, num_rows: int) -> PlacedPicture:
    return PlacedPicture(key, b"", np.arange(num_rows, dtype=np.int32).tobytes(), (0, 0, 0), False)


def test_pictures_are_taken_all_or_none_and_the_one_used_longest_ago_goes() -> None:
    cache = PictureCache(10, num_ranks=2)
    a, b, c = placed("a", 4), placed("b", 4), placed("c", 8)
    assert cache.take(1, (a, b, a)) == ([a, b], [])
    assert cache.take(2, (c,)) is None, "a and b are needed"
    assert [cache.answered(key) for key in ("a", "a", "b", "b")] == [False, True, False, True]
    assert cache.are_encoded((a, b))
    cache.rename(1, -1)
    assert cache.take(2, (c,)) is None, "a row needs them"
    assert cache.take(3, (b,)) == ([], [])
    assert cache.leave(-1)
    assert cache.take(2, (c,)) is None, "another request needs b"
    assert cache.leave(3)
    assert not cache.leave(3)
    assert cache.take(2, (placed("d", 4),)) == ([placed("d", 4)], ["a"]), "b was used after a"
    assert (cache.num_encoded, cache.num_found) == (3, 1)


def test_a_picture_that_cannot_be_encoded_is_forgotten_with_its_place() -> None:
    cache = PictureCache(4, num_ranks=1)
    a = placed("a", 4)
    cache.take(1, (a,))
    cache.take(2, (a,))
    assert cache.lost("a") == {1, 2}
    assert not cache.keeps_for(1, (a,))
    assert cache.take(3, (placed("b", 4),)) == ([placed("b", 4)], [])


def test_a_pictures_ids_are_past_every_vocabulary_and_follow_from_its_key() -> None:
    ids = picture_ids("a", 1000)
    assert ids.min() >= FIRST_ID
    assert len({*ids.tolist()}) > 990
    assert (picture_ids("a", 10) == ids[:10]).all()
    assert not (picture_ids("b", 1000) == ids).any()
