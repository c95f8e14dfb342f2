"""The cache of compiled grammars, and an engine without it."""

import pytest

from callboard import LLM, Grammar, RequestError, SamplingParams
from engine.features.grammar.grammars import GrammarCache
from engine.plugins import structured
from engine.plugins.grammar.llguidance import LLGuidance
from engine.plugins.hookspecs import GrammarContext
from tests.plugins.grammar_walk import EOS, PIECES, SPECIAL, VOCAB


def test_compiled_grammars_are_kept_within_a_size() -> None:
    built = []

    def new_engine() -> LLGuidance:
        built.append(1)
        return LLGuidance(GrammarContext(VOCAB, PIECES, SPECIAL, [EOS]))

    grammars = GrammarCache(new_engine, max_cache_bytes=300_000)
    for number in range(40):
        grammars.check(Grammar("regex", f"a{number}"))
        assert sum(compiled.num_bytes for compiled in grammars._cache.values()) <= 300_000
    assert built == [1]
    assert grammars.matcher(Grammar("regex", "a39")) is not grammars.matcher(Grammar("regex", "a39"))


def test_without_the_feature_grammars_are_refused_and_token_limits_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(structured, "feature_modules", lambda half: {})
    with LLM(progress=False) as llm:
        with pytest.raises(RequestError, match="this engine has no grammar plugin"):
            llm.generate("def f(", SamplingParams(grammar=Grammar("regex", "a+")))
        (output,) = llm.generate("def f(", SamplingParams(allowed_token_ids=(70, 71), temperature=0.0, max_tokens=4))
        assert set(output.token_ids) <= {70, 71}
