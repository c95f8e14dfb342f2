"""The settings of captures besides their mode: sizes, passes of plugins."""

from typing import Annotated, ClassVar

from engine.settings.section import Addition, key


class CaptureSettings(Addition, frozen=True):
    """The part of [graphs] about captured sizes."""

    table: ClassVar[str] = "graphs"

    max_rows: Annotated[int, key("Largest captured decode batch; larger ones run without graphs", ge=1)] = 512
    max_tokens: Annotated[int, key(
        "Largest captured step with prefill, in tokens; larger ones run without graphs, or compiled for any size", ge=1
    )] = 4096


class PassSettings(Addition, frozen=True):
    """The part of [plugins] about passes over captured pieces."""

    table: ClassVar[str] = "plugins"

    graph_passes: Annotated[list[str], key(
        "Passes over the model's pieces before graphs.mode=compiled compiles them, in this order", changed="executors"
    )] = []
