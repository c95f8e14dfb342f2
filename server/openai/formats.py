"""The fields that say what an output must look like, of three APIs, as one grammar.

Owns: their meaning, and that there is one at most.  Does not know: how a grammar is compiled or followed.
"""

from collections.abc import Iterator

import msgspec

from engine.errors import FieldError, RequestError
from engine.params import Grammar
from server.openai.requests import GenerationBody, ResponseFormat, StructuredOutputs, is_given

Named = tuple[str, Grammar]
JSON_OBJECT = Grammar("json_object")


def read_grammar(body: GenerationBody) -> Named | None:
    """(field, grammar), or None if the output is free.  Raises RequestError."""
    found = list(_all(body))
    if len(found) > 1:
        names = " and ".join(name for name, _ in found)
        raise RequestError(f"{names}: only one of them can be followed", param=found[1][0])
    if not found:
        return None
    return found[0]


def _all(body: GenerationBody) -> Iterator[Named]:
    if body.response_format is not None and (grammar := _of_format(body.response_format)) is not None:
        yield "response_format", grammar
    if body.structured_outputs is not None:
        yield from _of_structured(body.structured_outputs)
    if is_given(body.guided_json):
        yield "guided_json", _of_schema(body.guided_json)
    for name, regex in (("guided_regex", body.guided_regex), ("regex", body.regex)):
        if regex:
            yield name, Grammar("regex", regex)
    if body.guided_choice:
        yield "guided_choice", _of_choices(body.guided_choice)
    for name, source in (("guided_grammar", body.guided_grammar), ("ebnf", body.ebnf)):
        if source:
            yield name, Grammar("ebnf", source)
    if body.json_schema:
        yield "json_schema", Grammar("json_schema", body.json_schema)


def _of_format(given: ResponseFormat) -> Grammar | None:
    match given.type:
        case "text":
            return None
        case "json_object":
            asks_nothing = b"".join(bytes(given.schema).split()) in (b"null", b"{}")
            return JSON_OBJECT if asks_nothing else _of_schema(given.schema)
        case "json_schema":
            if given.json_schema is None:
                raise FieldError("response_format.json_schema", "required, but not given")
            return _of_schema(given.json_schema.schema)
    raise FieldError(
        "response_format.type", "must be 'text', 'json_object' or 'json_schema'", code="unsupported_parameter"
    )


def _of_structured(given: StructuredOutputs) -> Iterator[Named]:
    prefix = "structured_outputs"
    if is_given(given.json):
        yield f"{prefix}.json", _of_schema(given.json)
    if given.regex:
        yield f"{prefix}.regex", Grammar("regex", given.regex)
    if given.choice:
        yield f"{prefix}.choice", _of_choices(given.choice)
    if given.grammar:
        yield f"{prefix}.grammar", Grammar("ebnf", given.grammar)
    if given.json_object:
        yield f"{prefix}.json_object", JSON_OBJECT


def _of_schema(raw: msgspec.Raw) -> Grammar:
    """A schema may come as JSON or as a string that holds JSON."""
    source = bytes(raw).decode()
    return Grammar("json_schema", msgspec.json.decode(source, type=str) if source.startswith('"') else source)


def _of_choices(choices: list[str]) -> Grammar:
    return Grammar("choice", msgspec.json.encode(choices).decode())
