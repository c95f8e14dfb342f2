"""The values of Python callers: each is converted to its field's type, or refused with the field's name."""

from decimal import Decimal
from fractions import Fraction
from typing import Any

import msgspec
import numpy as np
import pytest

from engine.types.errors import RequestError
from engine.types.params import MAX_SEED, Grammar, SamplingParams


@pytest.mark.parametrize(
    ("given", "taken"),
    [
        ({"stop_token_ids": [5, np.int64(6)]}, {"stop_token_ids": (5, 6)}),
        ({"stop_token_ids": np.array([5])}, {"stop_token_ids": (5,)}),
        ({"stop_token_ids": None, "stop": None, "logit_bias": None}, {}),
        ({"allowed_token_ids": [5, np.int64(6)], "bad_words": "a"}, {"allowed_token_ids": (5, 6), "bad_words": ("a",)}),
        ({"stop": "x"}, {"stop": ("x",)}),
        ({"stop": ["x", "y"]}, {"stop": ("x", "y")}),
        ({"stop": np.array(["x", "y"])}, {"stop": ("x", "y")}),
        ({"stop": np.str_("x"), "pooling": np.str_("last")}, {"stop": ("x",), "pooling": "last"}),
        ({"max_tokens": 5.0, "top_k": np.float32(3)}, {"max_tokens": 5, "top_k": 3}),
        ({"seed": np.uint64(MAX_SEED)}, {"seed": MAX_SEED}),
        ({"temperature": 0, "top_p": np.float32(0.5)}, {"temperature": 0.0, "top_p": 0.5}),
        ({"min_p": Fraction(1, 4)}, {"min_p": 0.25}),
        ({"logit_bias": {"5": 1, np.int32(6): 2.0}}, {"logit_bias": {5: 1.0, 6: 2.0}}),
        ({"ignore_eos": np.bool_(True)}, {"ignore_eos": True}),
    ],
)
def test_what_is_meant_is_taken(given: dict[str, Any], taken: dict[str, Any]) -> None:
    params = SamplingParams(**given)
    assert params == SamplingParams(**taken)
    params.check(10)
    # Types as well: 5.0 == 5.  What has them crosses any wire.
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams, strict=True) == params
    assert SamplingParams().replace(**given) == params


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 5.5),
        ("max_tokens", "5"),
        ("max_tokens", True),
        ("max_tokens", Fraction(10**400)),
        ("max_tokens", Fraction(1, 2)),
        ("max_tokens", float("nan")),
        ("top_k", float("inf")),
        ("top_k", None),
        ("seed", [1]),
        ("seed", np.array([1, 2])),
        ("logprobs", True),
        ("temperature", "hot"),
        ("temperature", None),
        ("temperature", 10**400),
        ("temperature", Decimal(1)),
        ("min_p", 1j),
        ("ignore_eos", 1),
        ("skip_special_tokens", "no"),
        ("stop", 5),
        ("stop", b"x"),
        ("stop", [["x"]]),
        ("stop_token_ids", 5),
        ("stop_token_ids", "12"),
        ("stop_token_ids", [1.5]),
        ("stop_token_ids", np.array([[1]])),
        ("logit_bias", [1]),
        ("logit_bias", {"a": 1.0}),
        ("logit_bias", {1: "x"}),
        ("grammar", "root ::= x"),
        ("grammar", Grammar("sql")),  # type: ignore[arg-type]
        ("grammar", Grammar("regex", 5)),  # type: ignore[arg-type]
        ("pooling", []),
        ("pooling", np.array(["a", "b"])),
        ("grammar", Grammar("regex", "a", "maybe")),  # type: ignore[arg-type]
    ],
)
def test_what_cannot_be_meant_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(RequestError, match=f"^{field}.*: must be ") as refused:
        SamplingParams(**{field: value})
    assert refused.value.param is not None
    assert refused.value.param.startswith(field)
    assert len(refused.value.message) < 300


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("repetition_penalty", 1e-40),
        ("repetition_penalty", 10.5),
        ("temperature", float("nan")),
        ("max_tokens", 10**400),
        pytest.param("max_tokens", 10**5000, id="an integer that Python does not print"),
        ("max_tokens", 0),
        ("seed", MAX_SEED + 1),
        ("stop_token_ids", [10]),
        ("allowed_token_ids", [10]),
        ("stop_token_ids", [-1]),
        ("logit_bias", {10: 0.0}),
        ("logit_bias", {0: float("inf")}),
    ],
)
def test_what_is_out_of_range_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(RequestError, match=f"^{field}=.*: must be from ") as refused:
        SamplingParams(**{field: value}).check(10)
    assert len(refused.value.message) < 300
