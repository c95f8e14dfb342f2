"""The token ids of prompts in a recording: as they are, or replaced so that they cannot be read as text.

Owns: the key, which is never written.  Does not know: when something is recorded.
A token id becomes another one, the same one every time, by a permutation drawn at start.  So equal prefixes stay equal,
and the prefix cache, proposals and stop tokens work as before.  This is a substitution cipher: a recording alone
reveals no text, but with a long recording and the frequencies of tokens much of it can be guessed.
A cache salt is a client's secret, and is always replaced.
"""

import hashlib
import secrets
from dataclasses import replace

import msgspec
import numpy as np

from engine.actors.inboxes import SchedulerInbox
from engine.features.recording.turns import of_messages
from engine.messages import Admit, FeatureAnswer, StepDone, StepExtras
from engine.plugins.blueprint import Blueprint
from engine.text.pictures import FIRST_ID
from engine.types.notices import Reconfigure
from engine.types.params import SamplingParams
from engine.types.prompt import RequestPart

NO_TOKENS = (-2, -1)  # ``RULED_OUT`` and "none", which stay


class Privacy:
    """The replacement of token ids.  hashed: whether ids are replaced.  vocab_size: that of the model."""

    def __init__(self, vocab_size: int, *, hashed: bool) -> None:
        self._key = secrets.token_bytes(32)
        self._others: np.ndarray | None = None
        if hashed:
            order = np.random.default_rng(secrets.randbits(128)).permutation(vocab_size)
            # A negative id is counted from the end.
            self._others = np.concatenate((order, NO_TOKENS)).astype(np.int32)

    def blueprint(self, blueprint: Blueprint) -> Blueprint:
        """Return a blueprint with the replacements of its token ids.  Tokens of a larger vocabulary get theirs."""
        self._grow(blueprint.vocab_size)
        eos = self.ids(blueprint.limits.eos_token_ids)
        return msgspec.structs.replace(blueprint, limits=replace(blueprint.limits, eos_token_ids=eos))

    def _grow(self, vocab_size: int) -> None:
        """Add the tokens of another model that has more; those that were known keep their replacement."""
        if self._others is not None and vocab_size > (known := len(self._others) - len(NO_TOKENS)):
            more = known + np.random.default_rng(secrets.randbits(128)).permutation(vocab_size - known)
            self._others = np.concatenate((self._others[:known], more, NO_TOKENS)).astype(np.int32)

    def message(self, message: SchedulerInbox) -> SchedulerInbox:
        """Return the part of a message that is recorded: everything that influences plans."""
        if isinstance(message, StepDone):
            if self._others is None and not message.extras:
                return message
            return StepDone(
                rank=message.rank,
                step_id=message.step_id,
                token_ids=self.tokens(message.token_ids),
                extras=_planned_with(message.extras, hides=self._others is not None),
                parts={name: self._part(name, part) for name, part in message.parts.items()},
            )
        if isinstance(message, Admit):
            message = msgspec.structs.replace(
                message,
                token_ids=self.tokens(message.token_ids),
                params=self._params(message.params),
                cache_salt=self._salt(message.cache_salt),
                parts={name: self._content_of(name, part) for name, part in message.parts.items()},
            )
            return message if self._others is None else self._hidden(message)
        if isinstance(message, FeatureAnswer):
            replaced = of_messages("answer_with_other_tokens").get(message.feature)
            return message if replaced is None else replaced(message, self.tokens, self._salt)
        if isinstance(message, Reconfigure) and message.blueprint:
            blueprint = self.blueprint(msgspec.msgpack.decode(message.blueprint, type=Blueprint))
            return msgspec.structs.replace(message, blueprint=msgspec.msgpack.encode(blueprint))
        return message

    def tokens(self, token_ids: bytes) -> bytes:
        """Return token ids with their replacements.  Both are int32[n]."""
        if self._others is None or not token_ids:
            return token_ids
        ids = np.frombuffer(token_ids, dtype=np.int32)
        is_picture = (
            ids >= FIRST_ID
        )  # such an id follows from a picture's content; the pictures' feature writes another
        return np.where(is_picture, FIRST_ID, self._others[np.where(is_picture, 0, ids)]).tobytes()

    def _salt(self, salt: str) -> str:
        """Return another salt, the same one every time; none for none."""
        if not salt:
            return salt
        return hashlib.blake2b(salt.encode("utf-8", "surrogatepass"), key=self._key, digest_size=16).hexdigest()

    def _hidden(self, message: Admit) -> Admit:
        """Return a request without what lets a reader recognize the content of its parts."""
        for hide in (hide for name, hide in of_messages("hidden").items() if name in message.parts):
            message = hide(message, self._key)
        return message

    @staticmethod
    def _content_of(name: str, part: RequestPart) -> RequestPart:
        """Return a request's part without content that no plan depends on."""
        stripped = of_messages("planned_with").get(name)
        return part if stripped is None else stripped(part)

    def _part(self, name: str, part: bytes) -> bytes:
        replaced = of_messages("with_other_tokens").get(name)
        return part if replaced is None else replaced(part, self.tokens)

    def ids(self, token_ids: tuple[int, ...]) -> tuple[int, ...]:
        """Return a few token ids with their replacements."""
        if self._others is None:
            return token_ids
        return tuple(int(self._others[one]) for one in token_ids)

    def _params(self, params: SamplingParams) -> SamplingParams:
        """Return parameters without text of the client; that there was some stays, since it decides on proposals."""
        if self._others is None:
            return params
        grammar = params.grammar
        return msgspec.structs.replace(
            params,
            stop=(),
            stop_token_ids=self.ids(params.stop_token_ids),
            logit_bias={},
            bad_words=(),
            bad_token_ids=((0,),) if params.bad_token_ids else (),
            allowed_token_ids=(0,) if params.allowed_token_ids else (),
            logprob_token_ids=(0,) if params.logprob_token_ids else (),
            grammar=None if grammar is None else msgspec.structs.replace(grammar, source=""),
            logits_processors=dict.fromkeys(params.logits_processors, ""),
        )


def _planned_with(extras: dict[int, StepExtras], *, hides: bool) -> dict[int, StepExtras]:
    """Return extras without log probabilities and states, which are large and go to clients unchanged."""
    return {
        row: StepExtras(failure="(left out)" if hides else one.failure) for row, one in extras.items() if one.failure
    }
