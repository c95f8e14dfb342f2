"""The section [lora]."""

from typing import Annotated, Any, ClassVar

from engine.settings.section import Addition, key


class LoraSettings(Addition, frozen=True):
    """[lora]: LoRA adapters for the model, selected by their names as models."""

    table: ClassVar[str] = "lora"

    folder: Annotated[str, key(
        "Folder of adapters in PEFT's format: each of its folders is served by its name from the start, others can be "
        "loaded from below it; empty for none", is_place=True
    )] = ""
    max_adapters: Annotated[int, key(
        "Most adapters in use at once; requests with others wait", ge=1, le=256, changed="executors"
    )] = 8
    max_rank: Annotated[int, key(
        "Largest rank of an adapter; each uses memory and time for that rank", ge=1, le=512
    )] = 16

    def recorded(self) -> dict[str, Any]:
        """Return whether there are adapters, and how many at once."""
        return {"folder": "recorded" if self.folder else "", "max_adapters": self.max_adapters}
