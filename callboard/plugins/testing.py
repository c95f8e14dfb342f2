"""The conformance kit: one call for each kind of plugin checks it and lists every case that fails.

Owns: the public names of the kit.  Does not know: pytest, plugins.
Names that need torch are imported on first use: strategies and policies are checked without it.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from engine.plugins.declaration import Declaration, read_declaration
from engine.plugins.encoder.kit import check_encoder
from engine.plugins.kv_store.kit import check_kv_store
from engine.plugins.proof.attention_cases import AttentionCase
from engine.plugins.proof.findings import ConformanceError
from engine.plugins.snapshots.kit import check_snapshot_policy
from engine.plugins.testing.attention_cases import attention_cases
from engine.plugins.testing.eviction import check_eviction_strategy
from engine.plugins.testing.grammar import GrammarExample, check_grammar_engine
from engine.plugins.testing.observer import check_observer
from engine.plugins.testing.parsers import check_reasoning_parser, check_tool_parser
from engine.plugins.testing.policy import check_scheduling_policy
from engine.plugins.testing.proposer import check_proposer
from engine.plugins.transfer.kit import check_transfer

if TYPE_CHECKING:
    from engine.plugins.proof.attention import TOLERANCES, check_case
    from engine.plugins.proof.comm import check_rank
    from engine.plugins.proof.reference import attend
    from engine.plugins.testing.attention import check_attention_backend, through_hook
    from engine.plugins.testing.comm import check_comm
    from engine.plugins.testing.linear import check_linear
    from engine.plugins.testing.logits_processor import check_logits_processor
    from engine.plugins.testing.model import check_model

__all__ = [
    "TOLERANCES",
    "AttentionCase",
    "ConformanceError",
    "Declaration",
    "GrammarExample",
    "attend",
    "attention_cases",
    "check_attention_backend",
    "check_case",
    "check_comm",
    "check_encoder",
    "check_eviction_strategy",
    "check_grammar_engine",
    "check_kv_store",
    "check_linear",
    "check_logits_processor",
    "check_model",
    "check_observer",
    "check_proposer",
    "check_rank",
    "check_reasoning_parser",
    "check_scheduling_policy",
    "check_snapshot_policy",
    "check_tool_parser",
    "check_transfer",
    "read_declaration",
    "through_hook",
]

_NEED_TORCH = {
    "TOLERANCES": "proof.attention",
    "attend": "proof.reference",
    "check_attention_backend": "testing.attention",
    "check_case": "proof.attention",
    "check_comm": "testing.comm",
    "check_linear": "testing.linear",
    "check_logits_processor": "testing.logits_processor",
    "check_model": "testing.model",
    "check_rank": "proof.comm",
    "through_hook": "testing.attention",
}


def __getattr__(name: str) -> Any:
    if name in _NEED_TORCH:
        return getattr(import_module(f"engine.plugins.{_NEED_TORCH[name]}"), name)
    raise AttributeError(f"module 'callboard.plugins.testing' has no attribute {name!r}")
