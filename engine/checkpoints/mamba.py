"""Fields of config.json about Mamba 2 layers, which several families share.

Owns: those fields and their checks.  Does not know: torch, families, which layers are of this kind.
"""

import math

from engine.checkpoints.fields import Fields
from engine.checkpoints.reading import MAX_HEADS, MAX_TAPS, MAX_WIDTH, read_norm
from engine.checkpoints.shape import Mamba2Shape

INFINITIES = (math.inf, {"__float__": "Infinity"})  # JSON has none; transformers 5 writes the second one


def read_mamba(fields: Fields, hidden_size: int, *, inner: str = "") -> Mamba2Shape:
    """Return the layer of the fields that begin with mamba_.

    inner: name of the field with the size of all heads; '' or missing for mamba_expand * hidden_size."""
    fields.choice("hidden_act", "silu", ("silu",))
    size = fields.integer("mamba_expand", 2, maximum=MAX_TAPS) * hidden_size
    if inner and fields.has(inner):
        size = fields.integer(inner, maximum=MAX_WIDTH)
    heads = fields.integer("mamba_n_heads", 128, maximum=MAX_HEADS)
    groups = fields.integer("mamba_n_groups", 1, maximum=MAX_HEADS)
    head_size = fields.table.get("mamba_d_head", "auto")
    if size % heads or head_size not in ("auto", None, size // heads):
        raise fields.error("mamba_d_head", head_size, f"{size} / mamba_n_heads={heads}, without a remainder")
    check_groups(fields, "mamba_n_groups", groups, heads)
    bias = fields.flag("mamba_proj_bias", False)
    return Mamba2Shape(
        num_heads=heads,
        num_groups=groups,
        head_size=size // heads,
        state_size=fields.integer("mamba_d_state", 256, maximum=MAX_WIDTH),
        taps=fields.integer("mamba_d_conv", 4, minimum=2, maximum=MAX_TAPS),
        eps=read_norm(fields, "").eps,
        conv_bias=fields.flag("mamba_conv_bias", True),
        bias=bias,
        output_bias=bias,
        least_step=read_least_step(fields),
    )


def check_groups(fields: Fields, name: str, groups: int, heads: int) -> None:
    """Refuse groups that cannot have equally many heads."""
    if heads % groups:
        raise fields.error(name, groups, f"a divisor of the {heads} heads")


def read_least_step(fields: Fields) -> float:
    """Return the least step size of the limits of step sizes; only infinity is served as the largest."""
    name = "time_step_limit"
    limits = fields.table.get(name)
    if limits is None:
        return 0.0
    if isinstance(limits, list) and len(limits) == 2 and limits[1] in INFINITIES:
        least = limits[0]
        if isinstance(least, int | float) and least >= 0:
            return float(least)
    raise fields.error(name, limits, "[a number of at least 0, Infinity]")
