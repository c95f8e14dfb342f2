"""The section [replicas]: the router of several replicas."""

from typing import Annotated, ClassVar

from engine.settings.section import Addition, key


class ReplicasSettings(Addition, frozen=True):
    """The section [replicas]."""

    table: ClassVar[str] = "replicas"

    routing: Annotated[str, key(
        "How a router chooses a replica: prefix, least_busy, power_of_two, session, predicted, or module:Class"
    )] = "prefix"
