"""The settings of several models: the tables [[models]], and a part of the section [server]."""

from typing import Annotated, Any, ClassVar, Final, Literal, TypeVar

from engine.settings.additions import with_fields
from engine.settings.section import Addition, Array, Section, key

OWN: Final = ("model", "device", "kv", "scheduler", "graphs", "placement", "plugins")  # sections a model may have
S = TypeVar("S", bound=Section)


def with_own_sections(table: type[S]) -> type[S]:
    """Return the table of a model with its own sections."""
    about = {name: Annotated[dict[str, Any], key(f"[models.{name}], over the file's [{name}]")] for name in OWN}
    return with_fields(table, [(name, kind, {}) for name, kind in about.items()])


# fmt: off
@with_own_sections
class ModelTable(Array, frozen=True):
    """[[models]]: one of several models of a server; its own sections are laid over those of the file."""

    table: ClassVar[str] = "models"
    advice: ClassVar[str] = "`callboard serve` alone takes that; name a file of a single model"

    name: Annotated[str, key("Name in the model field of requests; unique among the models", min_length=1)]
    load: Annotated[Literal["start", "demand"], key(
        "'start': with the server; 'demand': at the first request for it"
    )] = "start"
    unload_after_s: Annotated[float, key(
        "Unloaded after being idle for this time; 0 for no time limit", ge=0
    )] = 0.0
    memory_mb: Annotated[int, key(
        "Its share of server.models_memory_mb; 0 measures its processes, without a GPU's memory", ge=0
    )] = 0

    def sections(self) -> dict[str, dict[str, Any]]:
        """Return section -> this model's own settings in it."""
        tables: dict[str, dict[str, Any]] = {name: getattr(self, name) for name in OWN}
        return {**tables, "model": {**tables["model"], "name": self.name}}


class ModelsSettings(Addition, frozen=True):
    """The part of [server] about several models."""

    table: ClassVar[str] = "server"

    models_memory_mb: Annotated[int, key(
        "Most memory that loaded [[models]] may use together; the least recently used idle one is unloaded for "
        "another; 0 for no limit", ge=0
    )] = 0


# fmt: on
