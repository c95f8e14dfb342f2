"""Weights and their versions, operators' commands about them, and what the planner and its ranks send each other.

Owns: the form of these.  Does not know: files, tensors, when weights change.
"""

from typing import Final, Literal

import msgspec

from engine.messages import FeatureAnswer, FeatureRequest

NAME: Final = "weight_updates"
COMMAND: Final = -1  # in place of a rank, in answers that are an operator's commands
Mode = Literal["finish", "keep", "retract", "abort"]
"""Running rows finish first, go on with their pages, have all their tokens computed again, or end."""
Tag = Literal["weights", "kv_cache"]
"""Memory that an engine gives back: that of the weights, or that of the pages."""
TAGS: Final[tuple[Tag, ...]] = ("weights", "kv_cache")
Announced = tuple[str, str, tuple[int, ...]]
"""Name, dtype in safetensors' spelling, and shape of a tensor."""


class Weights(msgspec.Struct, frozen=True):
    """One set of weights.

    number: grows with each change.  version: its name for clients, the number if none was given.
    directory: of the checkpoint.  digest: its fingerprint.  Both are empty for the weights of ``model.path``."""

    number: int = 0
    version: str = "0"
    directory: str = ""
    digest: str = ""


class Update(msgspec.Struct, frozen=True, tag=True):
    """Change the weights.  mode: None for that of the pause, and 'retract' without one.

    most: requests end that would have tokens of more versions; 0 for no limit."""

    weights: Weights
    mode: Mode | None = None
    most: int = 0


class Pause(msgspec.Struct, frozen=True, tag=True):
    """Plan nothing until ``Resume``; new requests wait."""

    mode: Mode


class Resume(msgspec.Struct, frozen=True, tag=True):
    """Go on."""


class GiveBack(msgspec.Struct, frozen=True, tag=True):
    """Plan nothing, and give memory back, until ``TakeBack`` has named all of it.  Running rows are retracted."""

    tags: tuple[Tag, ...]


class TakeBack(msgspec.Struct, frozen=True, tag=True):
    """Take memory again that was given back."""

    tags: tuple[Tag, ...]


Command = Update | Pause | Resume | GiveBack | TakeBack


class LoadWeights(msgspec.Struct, frozen=True, tag=True):
    """Read weights next to the present ones."""

    weights: Weights


class Switch(msgspec.Struct, frozen=True, tag=True):
    """Compute with the weights that were read; no step is in flight."""

    number: int


class Drop(msgspec.Struct, frozen=True, tag=True):
    """Forget the weights that were read, since another rank could not read them."""


class FreeMemory(msgspec.Struct, frozen=True, tag=True):
    """Give memory back; no step is in flight, and no page is in use any more."""

    tags: tuple[Tag, ...]


Request = LoadWeights | Switch | Drop | FreeMemory


_commands = msgspec.msgpack.Decoder(Command)
_requests = msgspec.msgpack.Decoder(Request)


def command_message(number: int, command: Command) -> FeatureAnswer:
    """Return a command as a message for the scheduler."""
    return FeatureAnswer(rank=COMMAND, feature=NAME, number=number, body=msgspec.msgpack.encode(command))


def command_of(message: FeatureAnswer) -> Command:
    """Return the command of a message."""
    command: Command = _commands.decode(message.body)
    return command


def request_of(message: FeatureRequest) -> Request:
    """Return what a message asks of a rank."""
    request: Request = _requests.decode(message.body)
    return request


def answer_to(message: FeatureRequest, rank: int, error: str = "") -> FeatureAnswer:
    """Return a rank's answer."""
    return FeatureAnswer(rank=rank, feature=NAME, number=message.number, body=msgspec.msgpack.encode(error))


def error_of(message: FeatureAnswer) -> str:
    """Return why a rank could not do what it was asked for; '' if it could."""
    return msgspec.msgpack.decode(message.body, type=str)


def sentence(message: FeatureRequest | FeatureAnswer) -> str:
    """Return a message in words."""
    if isinstance(message, FeatureRequest):
        return f"request {message.number}: {request_of(message)}"
    if message.rank == COMMAND:
        return f"command {message.number}: {command_of(message)}"
    return f"request {message.number} done on rank {message.rank}: {error_of(message) or 'fine'}"
