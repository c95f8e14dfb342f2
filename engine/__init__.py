"""callboard's engine.  ``LLM`` is imported when it is asked for, so that the torch-free half stays light."""

from typing import TYPE_CHECKING, Any

from engine.params import Grammar, SamplingParams

if TYPE_CHECKING:
    from engine.llm import LLM, Completion

__all__ = ["LLM", "Completion", "Grammar", "SamplingParams"]


def __getattr__(name: str) -> Any:
    if name in ("LLM", "Completion"):
        from engine import llm

        return getattr(llm, name)
    raise AttributeError(f"module 'engine' has no attribute {name!r}")
