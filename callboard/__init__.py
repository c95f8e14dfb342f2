"""Public names of callboard: the offline API, its errors and the version.  Plugins import ``callboard.plugins``.

Owns: which names are public.  Does not know: how they work.
``LLM`` is imported on first use, so that a plugin that imports this package starts fast.
"""

from typing import TYPE_CHECKING, Any

from callboard.shadows import refuse_shadows

refuse_shadows()

from engine import __version__  # noqa: E402
from engine.types.errors import (  # noqa: E402
    CallboardError,
    ConfigError,
    EngineDied,
    GraphError,
    PluginError,
    RequestError,
    WeightsError,
)
from engine.types.params import Grammar, SamplingParams  # noqa: E402

if TYPE_CHECKING:
    from engine.llm import LLM, Completion, Pooled

__all__ = [
    "LLM",
    "CallboardError",
    "Completion",
    "ConfigError",
    "EngineDied",
    "Grammar",
    "GraphError",
    "PluginError",
    "Pooled",
    "RequestError",
    "SamplingParams",
    "WeightsError",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name in ("LLM", "Completion", "Pooled"):
        from engine import llm

        return getattr(llm, name)
    raise AttributeError(f"module 'callboard' has no attribute {name!r}")
