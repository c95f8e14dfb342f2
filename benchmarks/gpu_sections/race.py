"""The race of attention backends on the heads of two models: each contender's times, or why it is out."""

from collections.abc import Iterator, Sequence

import torch

from engine.layers.attention import AttentionSpec
from engine.plugins.kinds import ATTENTION
from engine.plugins.manager import Plugins
from engine.startup.race import AttentionRace
from gpu_sections.rows import Row

HEAD_SIZE, PAGE_SIZE = 128, 16


def section(
    device: torch.device, models: Sequence[tuple[int, int, int]] = ((16, 8, 28), (40, 8, 40)), limit_s: float = 120.0
) -> Iterator[Row]:
    """A row per contender and step.  models: query heads, KV heads, layers.  One that is out is no failure.
    limit_s: of measuring, and again of compiling before that."""
    dtype = torch.float32
    if device.type == "cuda":  # processes of the race want its number
        device, dtype = torch.device("cuda", torch.cuda.current_device()), torch.bfloat16
    for heads, kv_heads, layers in models:
        spec = AttentionSpec(layers, heads, kv_heads, HEAD_SIZE, HEAD_SIZE**-0.5)
        plugins = Plugins({ATTENTION: "auto"})
        share_s = limit_s / len(models)
        report = AttentionRace(plugins, spec, PAGE_SIZE, device, dtype, limit_s=share_s, compile_s=share_s).run()
        fastest = report.fastest()
        for phase, results in report.results.items():
            for one in results:
                taken = ", taken" if fastest.get(phase) == one.contender else ""
                case = f"{heads}/{kv_heads} heads, {phase}: {one.contender}{taken}"
                if one.problem:
                    yield {"case": case, "ok": True, "problem": f"out: {one.problem}"}
                for load, us in one.us.items():
                    yield {"case": f"{case}, {load}", "ok": True, "us": us}
        yield {"case": f"{heads}/{kv_heads} heads: both phases", "ok": set(fastest) == {"prefill", "decode"}}
