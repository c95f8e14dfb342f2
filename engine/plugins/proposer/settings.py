"""The part of the section [plugins] about proposers."""

from typing import Annotated, ClassVar

from engine.settings.section import Addition, key


class ProposerSettings(Addition, frozen=True):
    """The part of [plugins] about proposers."""

    table: ClassVar[str] = "plugins"

    proposer: Annotated[str, key(
        "Proposer of draft tokens for a step to verify: ngram, suffix, draft_model, eagle, mtp; 'none' is none",
        changed="executors"
    )] = "none"
