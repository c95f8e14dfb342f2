"""The MLP of Apertus, whose activation has learned numbers.

Owns: its shape.  Does not know: torch, families.
"""

from typing import ClassVar

from engine.checkpoints.shape import MLPShape


class XIELUShape(MLPShape, frozen=True, kw_only=True):
    """A plain MLP with xIELU (Huang and Schlag 2024), a square above 0 and an integrated ELU below."""

    built_by: ClassVar[str] = "engine.layers.xielu:XIELU"
    activation: str = "xielu"
