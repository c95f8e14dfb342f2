"""The attention backends that a configuration names, one for each part of a step."""

from engine.settings.section import Section


class AttentionNames(Section, frozen=True):
    """Attention backends for the two parts of a step: sequences that read their prompt, and those that generate."""

    prefill: str = "auto"
    decode: str = "auto"
