"""The planner refuses a prompt whose pictures are not at their places, since the cache would keep wrong keys."""

from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import msgspec
import numpy as np
import pytest

from engine.features.images.planner import FILES, ImagesPlanner
from engine.messages import Admit
from engine.text.pictures import NAME, PlacedPicture, picture_ids
from engine.types.errors import RequestError
from engine.types.params import SamplingParams
from engine.types.prompt import RequestPart

PICTURE = PlacedPicture("key", b"", np.arange(2, 6, dtype=np.int32).tobytes(), (0, 0, 0), False)
TOKENS = np.array([5, 6, *picture_ids("key", 4), 7], dtype=np.int32)


def admit(tokens: np.ndarray) -> dict[str, Any]:
    """Admit a prompt with the picture, and return what the planner notes."""
    sequence = SimpleNamespace(tokens=tokens, params=SamplingParams(), notes={})
    part = RequestPart("", msgspec.msgpack.encode([PICTURE]))
    message = Admit(request_id=1, token_ids=tokens.tobytes(), params=sequence.params, parts={NAME: part})
    parts = Mock(limits=Mock(num_ranks=1, max_step_tokens=64), requests=Mock(open={}))
    ImagesPlanner(parts, num_rows=8).admit(sequence, message)  # type: ignore[arg-type]
    return sequence.notes


@pytest.mark.parametrize("tokens", [TOKENS[1:], TOKENS[:5], np.array([*TOKENS, TOKENS[2]])])
def test_a_prompt_whose_pictures_are_not_at_their_places_is_refused(tokens: np.ndarray) -> None:
    with pytest.raises(RequestError, match="other tokens at the places of its pictures"):
        admit(tokens)
    assert admit(TOKENS) == {NAME: (PICTURE,), FILES: {"key": b""}}
