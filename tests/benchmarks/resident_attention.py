"""Attention that plans nothing, in torch, under the name of a backend that does not either: see ``doubles.py``."""

from engine.layers.attention import AttentionFactory
from engine.plugins.hookspecs import AttentionContext, hookimpl
from tests.graphs.resident import ResidentTorchAttention

CALLBOARD_PLUGIN = {"api": 1}


@hookimpl
def callboard_attention_backend(context: AttentionContext) -> AttentionFactory:
    return ResidentTorchAttention
