"""The part of the section [server] about the socket for weights."""

from typing import Annotated, ClassVar

from engine.settings.section import Addition, key


class WeightsSocketSettings(Addition, frozen=True):
    """The part of [server] about the socket for weights."""

    table: ClassVar[str] = "server"

    weights_socket: Annotated[str, key(
        "Path of a Unix socket by which processes of the same user pass weights in memory; '' for none", is_place=True
    )] = ""
