"""The kernel that chooses experts against the layer's own choice in torch."""

import pytest
import torch

from engine.checkpoints.shape import RouterShape
from engine.kernels.fused import FusedKernels
from engine.layers.router import Router
from tests.kernels.interpreted.test_layers import normal

KERNELS = FusedKernels("cpu")
GROUPS = {"num_groups": 4, "num_chosen_groups": 2}


def a_router(shape: RouterShape, num_experts: int, num_chosen: int, dtype: torch.dtype) -> Router:
    """Scores are the inputs themselves."""
    router = Router(shape, num_experts, num_experts, num_chosen, torch.device("cpu"), dtype)
    router.linear.weight.copy_(torch.eye(num_experts))
    if router.linear.bias is not None:
        router.linear.bias.zero_()
    if router.correction_E is not None:
        router.correction_E.copy_(normal(num_experts, seed=3))
    return router


@pytest.mark.parametrize(
    "shape",
    [
        RouterShape(),
        RouterShape(bias=True, scale=2.5),
        RouterShape(normalised=False),
        RouterShape(normalised=False, exact=True, **GROUPS),
        RouterShape(corrected=True),
        RouterShape(scoring="sigmoid"),
        RouterShape(scoring="sigmoid", normalised=False),
        RouterShape(scoring="sigmoid", corrected=True, scale=2.5, exact=True, **GROUPS),
        RouterShape(scoring="sigmoid", corrected=True, normalised=False, **GROUPS),
    ],
)
@pytest.mark.parametrize(("num_experts", "num_chosen"), [(20, 3), (32, 4)])
def test_the_choice_is_that_of_the_layer(shape, num_experts, num_chosen):
    router = a_router(shape, num_experts, num_chosen, torch.float32)
    x = normal(9, num_experts, seed=7)
    weights, experts = router(x)
    found_weights, found_experts = router(x, KERNELS)
    order, found_order = experts.argsort(-1), found_experts.argsort(-1)
    assert torch.equal(found_experts.gather(1, found_order), experts.gather(1, order))
    torch.testing.assert_close(found_weights.gather(1, found_order), weights.gather(1, order), rtol=2e-6, atol=1e-7)


def test_the_best_comes_first_and_of_equals_the_first():
    router = a_router(RouterShape(), 5, 3, torch.bfloat16)
    weights, experts = router(torch.tensor([[0, 2, 1, 2, -1.0]], dtype=torch.bfloat16), KERNELS)
    assert experts.tolist() == [[1, 3, 2]]
    assert weights.dtype == torch.bfloat16


@pytest.mark.parametrize(
    "shape", [RouterShape(), RouterShape(corrected=True), RouterShape(scoring="sigmoid", **GROUPS)]
)
def test_scores_that_are_not_numbers_still_give_distinct_experts(shape):
    x = torch.full((3, 8), torch.nan)
    x[1] = -torch.inf
    x[2, 3:] = 1.0
    _, experts = a_router(shape, 8, 4, torch.float32)(x, KERNELS)
    for row in experts.tolist():
        assert len(set(row)) == 4
        assert set(row) <= set(range(8))


def test_no_tokens():
    weights, experts = a_router(RouterShape(), 5, 3, torch.float32)(torch.empty(0, 5), KERNELS)
    assert weights.shape == experts.shape == (0, 3)
