"""docs/api.md names every route and every field, and docs/structured_output.md every way to ask for a grammar."""

import re
from pathlib import Path

import pytest

from server.extensions.anthropic.requests import CountBody, MessagesBody
from server.extensions.native.bodies import NativeBody, NativeParams
from server.extensions.pooling.classify import ClassifyBody
from server.extensions.pooling.embeddings import EmbeddingBody
from server.extensions.pooling.pairs import RerankBody, ScoreBody
from server.extensions.pooling.raw import PoolingBody
from server.extensions.responses.requests import ResponsesBody
from server.http.body import UNSUPPORTED
from server.openai.requests import ChatBody, CompletionBody, StreamOptions, StructuredOutputs
from server.openai.tokenization import DetokenizeBody, TokenizeBody
from server.operators.administration import AbortBody
from server.run.core import all_parts
from server.run.extension import declared

DOCS = Path(__file__).parents[2] / "docs"
API = (DOCS / "api.md").read_text()
STRUCTURED = (DOCS / "structured_output.md").read_text()
BODIES = (
    CompletionBody, ChatBody, ResponsesBody, EmbeddingBody, ClassifyBody, ScoreBody, RerankBody, PoolingBody,
    TokenizeBody, DetokenizeBody, StreamOptions, NativeBody, NativeParams, AbortBody, CountBody, MessagesBody,
)  # fmt: skip


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_every_field_is_named(body: type) -> None:
    assert [name for name in body.__struct_fields__ if f"`{name}`" not in API] == []


def test_every_route_is_named() -> None:
    assert [one.name for one in declared(all_parts()) if one.summary and one.name not in API] == []


def test_every_test_that_is_named_is_there() -> None:
    named = set(re.findall(r"`(tests/[a-z_/]+\.py|test_[a-z_]+\.py)`", API))
    tests = DOCS.parent / "tests"
    assert [one for one in named if not (tests / "server" / one).exists() and not (DOCS.parent / one).exists()] == []


def test_what_is_refused_is_named() -> None:
    rest = {"best_of", "function_call", "grammar", "modalities"}  # known elsewhere, or old names of what is named
    assert {name for name in UNSUPPORTED if f"`{name}`" not in API} <= rest


def test_every_name_of_a_grammar_is_named() -> None:
    fields = [name for name in CompletionBody.__struct_fields__ if re.match(r"guided_|regex|ebnf|json_schema", name)]
    assert all(f"`{name}`" in STRUCTURED for name in [*fields, "response_format", "structured_outputs"])
    assert all(f'"{name}"' in STRUCTURED for name in StructuredOutputs.__struct_fields__)
