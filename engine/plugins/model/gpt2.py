"""GPT-2 (Radford et al. 2019): learned positions, layer norms with biases, as many KV heads as query heads.

Its linear layers are stored as [inputs, outputs], or in a GGUF file as others, and q, k and v as one."""

from engine.checkpoints.reading import MAX_HEADS, MAX_LAYERS, MAX_VOCAB, MAX_WIDTH
from engine.checkpoints.shape import AttentionShape, DecoderShape, LayerNormShape, LayerShape, MLPShape, Names
from engine.plugins.hookspecs import ModelContext, hookimpl

CALLBOARD_PLUGIN = {"api": 1, "architectures": {"GPT2LMHeadModel": "gpt2"}}
ACTIVATIONS = {"gelu_new": "gelu_pytorch_tanh", "gelu_pytorch_tanh": "gelu_pytorch_tanh", "gelu": "gelu"}


@hookimpl
def callboard_model(context: ModelContext) -> DecoderShape:
    """Return the shape, read from config.json's own names for every field."""
    fields = context.fields
    hidden_size = fields.integer("n_embd", 768, maximum=MAX_WIDTH)
    num_heads = fields.integer("n_head", 12, maximum=MAX_HEADS)
    if hidden_size % num_heads:
        raise fields.error("n_embd", hidden_size, f"a multiple of n_head={num_heads}")
    for name, usual in (("scale_attn_weights", True), ("scale_attn_by_inverse_layer_idx", False)):
        fields.demand(name, usual, "scores are scaled by the size of a head")
    fields.demand("add_cross_attention", False, "there is no encoder")
    activation = fields.choice("activation_function", "gelu_new", ACTIVATIONS)
    eps = fields.number("layer_norm_epsilon", 1e-5)
    transposed = fields.flag("transposed", True)
    layer = LayerShape(
        before_attention=LayerNormShape(name="ln_1", eps=eps),
        attention=AttentionShape(
            num_heads=num_heads,
            num_kv_heads=num_heads,
            head_size=hidden_size // num_heads,
            rotary=None,
            qkv_bias=True,
            output_bias=True,
            name="attn",
            merged="c_attn",
            output="c_proj",
            transposed=transposed,
        ),
        before_mlp=LayerNormShape(name="ln_2", eps=eps),
        mlp=MLPShape(
            intermediate_size=fields.integer("n_inner", 4 * hidden_size, maximum=MAX_WIDTH),
            activation=ACTIVATIONS[activation],
            up="c_fc",
            down="c_proj",
            bias=True,
            transposed=transposed,
        ),
    )
    max_len = fields.integer("n_positions", 1024)
    return DecoderShape(
        vocab_size=fields.integer("vocab_size", 50257, maximum=MAX_VOCAB),
        hidden_size=hidden_size,
        max_len=max_len,
        layers=(layer,) * fields.integer("n_layer", 12, maximum=MAX_LAYERS),
        norm=LayerNormShape(name="transformer.ln_f", eps=eps),
        tied=fields.flag("tie_word_embeddings", True),
        learned_positions=max_len,
        names=Names(embedding="transformer.wte", positions="transformer.wpe", layers="transformer.h"),
    )
