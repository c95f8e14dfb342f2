"""The MLP of Apertus, whose activation has learned numbers.

Owns: its shape.  Does not know: torch, families.
"""

from typing import ClassVar

from engine.checkpoints.shape import MLPShape


class XIELUShape(MLPShape, frozen=True, kw_only=True):
    """A plain MLP with xIELU (Huang and Schlag 2024), a square above 0 and an integrated ELU below.

    numbers: alpha_p, alpha_n, beta and eps of the activation; () if they are tensors."""

    built_by: ClassVar[str] = "engine.layers.xielu:XIELU"
    numbers: tuple[float, ...] = ()
    activation: str = "xielu"
