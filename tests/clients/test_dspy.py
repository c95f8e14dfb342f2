"""DSPy: programs of typed steps, held to their types by a JSON schema.  ``make conformance`` installs it."""

from typing import Literal

import pytest

dspy = pytest.importorskip("dspy", reason="dspy is not installed: make conformance")
pytestmark = pytest.mark.filterwarnings("default")  # theirs are not ours to mend


def test_a_typed_step(url: str) -> None:
    class HeldToSchemas(dspy.LM):
        """DSPy asks a list of known models what a server can do; this one is not in it."""

        supports_response_schema = True
        supported_params = frozenset({"response_format"})

    model = HeldToSchemas(
        "openai/demo", api_base=url, api_key="none", temperature=0, max_tokens=60, cache=False, num_retries=0
    )
    assert model("Write a function.")[0]
    signature = dspy.Signature("question -> city").with_updated_fields("city", type_=Literal["Paris", "Oslo"])
    step = dspy.Predict(signature)
    with dspy.context(lm=model, adapter=dspy.JSONAdapter()):
        assert step(question="Where to?").city in ("Paris", "Oslo")
