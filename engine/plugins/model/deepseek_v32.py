"""DeepSeek-V3.2 (DeepSeek-AI 2025) up to the number of tokens that its indexer chooses: DeepSeek-V3 so far.

Its attention sees the ``index_topk`` tokens of highest index score, so up to so many tokens it sees them all.  Longer
sequences are not served, and the indexer is not read."""

from dataclasses import replace

import msgspec

from engine.checkpoints.fields import Fields
from engine.checkpoints.shape import DecoderShape
from engine.plugins.hookspecs import ModelContext, hookimpl
from engine.plugins.model import deepseek_v3

CALLBOARD_PLUGIN = {"api": 1, "architectures": {"DeepseekV32ForCausalLM": "deepseek_v32"}}

INDEXER = r"^model\.layers\.\d+\.self_attn\.indexer\."


@hookimpl
def callboard_model(context: ModelContext) -> DecoderShape:
    """Return the shape.  Files of transformers also name the kind of each layer, of which there is one."""
    table = {name: value for name, value in context.fields.table.items() if name != "layer_types"}
    fields = Fields(table, context.fields.origin)
    shape = deepseek_v3.callboard_model(replace(context, fields=fields))
    max_len = min(shape.max_len, fields.integer("index_topk", 2048))
    predictor = shape.predictor
    if predictor is not None:
        predictor = msgspec.structs.replace(predictor, unread=(*predictor.unread, INDEXER))
    return msgspec.structs.replace(shape, max_len=max_len, predictor=predictor, unread=(*shape.unread, INDEXER))
