"""A variant of the served model: what else requests may name as a model."""

import msgspec

from engine.types.prompt import RequestPart


class ServedVariant(msgspec.Struct, frozen=True, kw_only=True):
    """Something that requests name as a model.  created: Unix time.  parts: those of its requests, by feature."""

    created: int
    parts: dict[str, RequestPart]
