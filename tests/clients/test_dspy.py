"""DSPy: programs of typed steps, held to their types by a JSON schema.  ``make conformance`` installs it."""

from typing import Literal

import pytest

dspy = pytest.importorskip("dspy", reason="dspy is not installed: make conformance")


pytestmark = pytest.mark.filterwarnings("default")  # theirs are not ours to mend
import litellm  # noqa: E402


def test_a_typed_step(url: str) -> None:
    asked = {"temperature": 0, "max_tokens": 60, "cache": False, "num_retries": 0}
    # What LiteLLM, which is below it, does not know of a model it does not use.
    litellm.register_model({"openai/demo": {"litellm_provider": "openai", "supports_response_schema": True}})
    model = dspy.LM("openai/demo", api_base=url, api_key="none", **asked)
    assert model("Write a function.")[0]
    signature = dspy.Signature("question -> city").with_updated_fields("city", type_=Literal["Paris", "Oslo"])
    step = dspy.Predict(signature)
    with dspy.context(lm=model, adapter=dspy.JSONAdapter()):
        assert step(question="Where to?").city in ("Paris", "Oslo")
