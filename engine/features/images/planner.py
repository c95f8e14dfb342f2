"""Pictures in the planner: sequences that wait until every rank has encoded their pictures.

Owns: the requests to the ranks, which pictures they keep, the pictures of new rows.
Does not know: what an encoder computes, pages, the queue.

A sequence whose turn has come is held until the ranks have the pictures of its prompt that the cache of pages does not
cover.  They keep these until the prompt is computed, and later as far as there is room: a retraction, or new
executors, make it wait again.
"""

from functools import partial
from typing import Final

import msgspec
import numpy as np

from engine.features.images.cache import PictureCache
from engine.features.images.messages import EncodePicture, PictureEncoded, PictureFile, RowPicture, part_of
from engine.features.images.settings import ImageSettings
from engine.messages import Admit, Failed, FeatureAnswer, FeatureRequest, Finish
from engine.plugins.features import FeatureContext
from engine.scheduling.events import Why
from engine.scheduling.feature import NewFeature, PlannerFeature, PlannerParts
from engine.scheduling.rows import Sequence
from engine.scheduling.step_builder import StepBuilder
from engine.text.pictures import FIRST_ID, NAME, PlacedPicture, placed_pictures
from engine.types import spans
from engine.types.errors import RequestError
from engine.types.spans import WholeSpan

FILES: Final = f"{NAME}.files"
"""The name of the note with the files of a request, by the keys of its pictures, which have none."""
Pictures = tuple[PlacedPicture, ...]


class ImagesPlanner(PlannerFeature):
    """The pictures of one planner's requests.  num_rows: places of pictures that each rank keeps."""

    def __init__(self, parts: PlannerParts, num_rows: int) -> None:
        self._parts = parts
        self._cache = PictureCache(num_rows, parts.limits.num_ranks)
        self._waiting: dict[int, Sequence] = {}  # by request
        self._requests: list[FeatureRequest] = []
        self._keys: dict[int, str] = {}  # of pictures that are being encoded, by number of the request to the ranks
        self._num_requested = 0
        self._left: list[str] = []  # keys of pictures that ranks may keep from before a reset
        self._new_rows: dict[int, Pictures] = {}
        self._whole: dict[int, list[tuple[int, int]]] = {}  # by row, positions that must be computed at once
        self._ends: dict[int, int] = {}  # by row, the tokens after which it needs no picture
        self._in_step: set[int] = set()  # rows that have a chunk in the step that is being planned

    def admit(self, sequence: Sequence, message: Admit) -> None:
        if (part := message.parts.get(NAME)) is None:
            return
        if sequence.params.prompt_logprobs is not None or not sequence.params.generates:
            raise RequestError(
                "a prompt with pictures generates text, without prompt_logprobs; leave them out",
                param="prompt_logprobs",
            )
        pictures = placed_pictures(part)
        (places,) = np.nonzero(sequence.tokens >= FIRST_ID)
        if places.astype(np.int32).tobytes() != b"".join(one.places for one in pictures):
            raise RequestError(
                "the prompt has other tokens at the places of its pictures; send the conversation whole",
                param="messages",
            )
        num_rows = sum(len(one.places_n) for one in {one.key: one for one in pictures}.values())
        if num_rows > self._cache.most:
            raise RequestError(
                f"the pictures of this request have {num_rows} tokens, and images.cache_tokens={self._cache.most} is "
                "the most; send fewer or smaller pictures",
                code="too_many_pictures",
                param="messages",
            )
        longest = max((end - start for one in pictures if one.whole for start, end in one.runs), default=0)
        if longest > (most := self._parts.limits.max_step_tokens):
            raise RequestError(
                f"a picture of this request has {longest} tokens, which one step must compute at once, and "
                f"scheduler.max_step_tokens={most} is the most of a step; send a smaller picture or raise the setting",
                code="too_long_picture",
                param="messages",
            )
        sequence.notes[FILES] = self._shared_files(pictures)
        sequence.notes[NAME] = tuple(msgspec.structs.replace(one, data=b"") for one in pictures)

    def _shared_files(self, pictures: Pictures) -> dict[str, bytes]:
        """Return the file of each picture by its key: that of another open request which has the picture."""
        files = {one.key: one.data for one in pictures}
        for sequence in self._parts.requests.open.values():
            others: dict[str, bytes] = sequence.notes.get(FILES, {})
            files.update((key, others[key]) for key in files.keys() & others.keys())
        return files

    # ---- before a sequence has a row ---------------------------------------------------------

    def hold(self, sequence: Sequence) -> Why | None:
        """Request what the ranks lack, and hold the sequence until they have it."""
        if NAME not in sequence.notes or self._is_ready(sequence):
            return None
        self._waiting[sequence.request_id] = sequence
        return "encode"

    def has_room(self, sequence: Sequence) -> bool:
        """Return whether the ranks have the pictures that they need to compute the sequence."""
        if NAME not in sequence.notes or self._is_ready(sequence):
            return True
        for user in list(self._cache.waiting):  # this one cannot give up its turn, so it goes before them
            self._cache.leave(user)
        return self._is_ready(sequence)

    def _is_ready(self, sequence: Sequence) -> bool:
        """Return whether the ranks keep what the sequence needs; request it otherwise, if the cache has room."""
        pictures: Pictures = sequence.notes[NAME]
        num_cached = self._parts.pages.num_cached_tokens(sequence)
        needed = [one for one in pictures if one.end > num_cached]
        if not self._cache.keeps_for(sequence.request_id, needed):
            if (taken := self._cache.take(sequence.request_id, needed)) is None:
                self._cache.leave(sequence.request_id)  # what it had may be the room that another one waits for
                return False
            new, forgotten = taken
            files: dict[str, bytes] = sequence.notes[FILES]
            for one in new:
                picture = PictureFile(one.key, files[one.key], len(one.places_n), one.way)
                self._request(picture, tuple(forgotten))
                forgotten = []
        return self._cache.are_encoded(needed)

    def _request(self, picture: PictureFile | None, forgotten: tuple[str, ...]) -> None:
        left, self._left = self._left, []
        self._requests.append(EncodePicture(picture, (*left, *forgotten)).message(self._num_requested))
        if picture is not None:
            self._keys[self._num_requested] = picture.key
        self._num_requested += 1

    def outgoing(self) -> list[FeatureRequest]:
        requests, self._requests = self._requests, []
        return requests

    def received(self, message: FeatureAnswer) -> None:
        """Take one rank's answer.  The last one gives sequences back to the queue."""
        if message.feature != NAME or (key := self._keys.get(message.number)) is None:
            return  # another rank could not encode it, or the executors that got the request are gone
        answer = PictureEncoded.of(message)
        if answer.reason:
            del self._keys[message.number]
            error = RequestError(answer.reason, status=answer.status, code="bad_picture", param="messages")
            users = self._cache.lost(key)
            self._request(None, (key,))  # others may have encoded it; first, since a request may want it again
            self._fail([self._parts.requests.open[user] for user in users if user >= 0], error)
        elif self._cache.answered(key):
            del self._keys[message.number]
        self._give_back()

    def _fail(self, sequences: list[Sequence], error: RequestError) -> None:
        """End requests that have no row."""
        for sequence in sequences:  # all, before the end of one gives others back to the queue
            self._parts.prefills.forget(sequence)
        for sequence in sequences:
            self._parts.requests.end(sequence, Finish.ERROR, len(sequence.tokens))
            self._parts.requests.outbox.append(Failed.of(sequence.request_id, error))

    def _give_back(self) -> None:
        """Queue the sequences that the ranks can compute now."""
        for sequence in list(self._waiting.values()):
            if self._is_ready(sequence):
                del self._waiting[sequence.request_id]
                self._parts.prefills.wait(sequence)
        self._parts.prefills.unblock()

    def num_held(self) -> int:
        """Return the number of sequences that wait for pictures."""
        return len(self._waiting)

    def forget(self, sequence: Sequence) -> bool:
        return self._waiting.pop(sequence.request_id, None) is not None

    def ended(self, sequence: Sequence) -> None:
        """Keep the pictures of a request without a row no longer."""
        if self._cache.leave(sequence.request_id):
            self._give_back()

    # ---- rows -------------------------------------------------------------------------------

    def started(self, sequence: Sequence) -> None:
        """Keep the pictures for the row, from now until its prompt is computed."""
        if (pictures := sequence.notes.get(NAME)) is not None:
            self._new_rows[sequence.row] = pictures
            self._ends[sequence.row] = len(sequence.tokens)
            if whole := [run for one in pictures if one.whole for run in one.runs]:
                self._whole[sequence.row] = whole
            self._cache.rename(sequence.request_id, _user_of(sequence.row))

    def attach(self, step: StepBuilder) -> None:
        """Add to the step the pictures of new rows, and those that no cut may divide."""
        self._in_step.clear()
        if self._whole and step.prompts is not None:
            step.parts |= spans.part_of(
                WholeSpan(row, first, end)
                for row in step.prompts.rows.tolist()
                for first, end in self._whole.get(row, ())
            )
        if self._new_rows:
            step.parts |= part_of(
                {row: tuple(map(RowPicture.of, pictures)) for row, pictures in self._new_rows.items()}
            )
            self._new_rows.clear()

    def chunk_tokens(self, row: int, most: int) -> int:
        """Return the number of tokens that ends before a picture, or behind it, where it must be computed at once.

        It is more than ``most`` only where the row has no chunk in the step and such a picture is next."""
        whole = self._whole.get(row)
        if whole is None or most < 1:
            return most
        start, goes_on = int(self._parts.table.num_computed[row]), row in self._in_step
        self._in_step.add(row)
        for first, end in whole:
            if first < start < end:  # pages of its beginning were cached
                most = max(most, end - start)
            elif start <= first < start + most < end:
                ahead = first - start
                return ahead if ahead or goes_on else end - start
        return most

    def published(self, row: int, num_tokens: int) -> None:
        if num_tokens >= self._ends.get(row, num_tokens + 1):
            self.released(row)

    def released(self, row: int) -> None:
        """Keep the pictures of the row no longer: no step in flight reads them."""
        self._whole.pop(row, None)
        if self._ends.pop(row, None) is not None and self._cache.leave(_user_of(row)):
            self._give_back()

    def reset(self) -> list[Sequence]:
        """Forget every picture.  New executors keep none; those that have slept forget theirs with the next request."""
        sequences = list(self._waiting.values())
        for unsent in self._requests:
            self._left += EncodePicture.of(unsent).forget
        self._left += self._cache.keys
        self._waiting.clear()
        self._requests.clear()
        self._keys.clear()
        self._new_rows.clear()
        self._ends.clear()
        self._whole.clear()
        self._in_step.clear()
        self._cache.clear()
        return sequences

    def gauges(self) -> dict[str, int]:
        """Return how many pictures were encoded, and how many were found encoded; nothing before the first."""
        if not self._cache.num_encoded:
            return {}
        return {"pictures_encoded": self._cache.num_encoded, "pictures_found": self._cache.num_found}


def _user_of(row: int) -> int:
    """Return the name under which a row needs pictures; those of requests are not negative."""
    return -1 - row


def planner_feature(context: FeatureContext) -> NewFeature | None:
    """Return the builder of the feature; None for a model of text."""
    if NAME not in context.found:
        return None
    return partial(ImagesPlanner, num_rows=ImageSettings.of(context.config).cache_tokens)
