"""Which experts a token visits, and with which weights, against transformers' routers."""

import pytest
import torch
from transformers import DeepseekV2Config, DeepseekV3Config
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter

from engine.checkpoints.shape import RouterShape
from engine.layers.router import Router

WIDTH, EXPERTS, CHOSEN = 32, 12, 4
SIZES = {
    "hidden_size": WIDTH,
    "n_routed_experts": EXPERTS,
    "num_experts_per_tok": CHOSEN,
    "n_group": 4,
    "topk_group": 2,
}
GROUPS = {"num_groups": 4, "num_chosen_groups": 2}


def v2(method: str) -> DeepseekV2TopkRouter:
    return DeepseekV2TopkRouter(DeepseekV2Config(**SIZES, topk_method=method, routed_scaling_factor=3.0))


def v3(normalised: bool) -> DeepseekV3TopkRouter:
    return DeepseekV3TopkRouter(DeepseekV3Config(**SIZES, norm_topk_prob=normalised))


@pytest.mark.parametrize(
    "reference,shape",
    [
        (v2("greedy"), RouterShape(normalised=False, scale=3.0, exact=True)),
        (v2("group_limited_greedy"), RouterShape(normalised=False, scale=3.0, exact=True, **GROUPS)),
        (v3(True), RouterShape(scoring="sigmoid", corrected=True, scale=2.5, exact=True, **GROUPS)),
        (v3(False), RouterShape(scoring="sigmoid", normalised=False, corrected=True, scale=2.5, exact=True, **GROUPS)),
    ],
    ids=["softmax", "softmax in groups", "corrected sigmoids", "corrected sigmoids as they are"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_choice_and_the_weights(reference: torch.nn.Module, shape: RouterShape, dtype: torch.dtype):
    generator = torch.Generator().manual_seed(0)
    router = Router(shape, WIDTH, EXPERTS, CHOSEN, torch.device("cpu"), dtype)
    with torch.no_grad():
        reference.weight.normal_(0, 0.5, generator=generator)
        router.linear.weight.copy_(reference.weight)
        if router.correction_E is not None:
            # So large that it decides more often than the scores do, and below 0 for half of them.
            reference.e_score_correction_bias.normal_(0, 1, generator=generator)
            router.correction_E.copy_(reference.e_score_correction_bias)
        x_TD = torch.randn(50, WIDTH, generator=generator).to(dtype)
        _, weights, experts = reference(x_TD)
        weights_TK, experts_TK = router(x_TD)
    assert weights_TK.dtype == dtype
    order, expected_order = experts_TK.argsort(-1), experts.argsort(-1)
    assert torch.equal(experts_TK.gather(1, order), experts.gather(1, expected_order))
    expected = weights.gather(1, expected_order).to(dtype)
    torch.testing.assert_close(weights_TK.gather(1, order), expected, rtol=1e-6, atol=0)
