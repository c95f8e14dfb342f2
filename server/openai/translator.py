"""Request fields as what they ask of the engine.

Owns: how fields become sampling parameters, which of three APIs' fields says what an output must look like, and what
is wrong whatever the prompt is.
Does not know: JSON, prompts' formats, responses, how a grammar is compiled.  A sampling parameter reaches the engine if
bodies declare it by the name that it has there; a name that only one of the two has never does.
"""

from collections.abc import Callable, Iterator, Mapping

import msgspec

from engine.messages import DEFAULT_OPTIONS, RequestOptions
from engine.text.tool_calls import ToolFormat
from engine.types.errors import FieldError, RequestError
from engine.types.params import MAX_GRAMMAR_CHARS, MAX_SEED, Grammar, SamplingParams
from engine.types.prompt import ChatOptions, Origin, Prompt, RequestPart
from server.generate.generation import MAX_CHOICES, Generation
from server.generate.sight import Sight
from server.http.body import is_given
from server.model_card import ANY_MODEL, ModelCard
from server.openai.conversation import HERMES, NO_TOOLS, ToolRequest
from server.openai.requests import GenerationBody, ResponseFormat, StructuredOutputs
from server.openai.structural_tags import decode_structural_tag, read_structural_tag
from server.variant import ServedVariant

DEFAULT = SamplingParams()
SAME_FIELDS = tuple(name for name in SamplingParams.__struct_fields__ if name in GenerationBody.__struct_fields__)
LEAST_SEED = -(1 << 63)
MAX_TENANT = 256  # characters of a ``user`` that are looked at
NO_SEED = -1  # to vLLM and llama.cpp
Named = tuple[str, Grammar]
JSON_OBJECT = Grammar("json_object")
NO_BUDGET = (
    "not possible here: the model must write its thoughts between two tokens, and plugins.logits_processors must name "
    "thinking_budget"
)


def tenant_of(user: str | None) -> Origin:
    """Returns the origin of a request that names this ``user``; none where a key says it."""
    return Origin(tenant=(user or "")[:MAX_TENANT])


class Translator:
    """Turns request bodies into generations for one model, which ``card`` describes.

    tool_format: how it writes function calls.  variants: name -> what else can be asked for as a model; they come and
    go.
    The card may be replaced by one of the same name.
    session_parts: gives the parts of a request by its session's name and the time that its prefix is to stay.
    limit_thoughts: gives the logits processors that end thoughts after so many tokens, and raises RequestError; None
    if nothing can end them.
    effort_budgets: the most tokens of thoughts by reasoning effort; none where the chat template reads the effort.
    sight: reads the pictures of conversations; None where the model reads text alone."""

    def __init__(
        self,
        card: ModelCard,
        tool_format: ToolFormat | None = None,
        server: str = "",
    ) -> None:
        """Make a translator.  tool_format: None for the hermes format.  server: what the fingerprint says of it."""
        self.card = card
        self.variants: dict[str, ServedVariant] = {}
        self._server = server
        self.session_parts: Callable[[str, float], dict[str, RequestPart]] = _no_parts
        self.limit_thoughts: Callable[[int], dict[str, str]] | None = None
        self.effort_budgets: Mapping[str, int] = {}
        self.sight: Sight | None = None
        self.tool_format = tool_format or HERMES

    @property
    def sees(self) -> bool:
        """Whether pictures are read."""
        return self.sight is not None

    @property
    def fingerprint(self) -> str:
        """The fingerprint in answers: of the server, and of the weights and what they are computed with."""
        return "-".join(filter(None, (self._server, self.card.fingerprint)))

    def translate(
        self,
        body: GenerationBody,
        prompts: tuple[Prompt, ...],
        *,
        max_tokens: int | None,
        logprobs: int | None,
        echo: bool = False,
        num_choices: int | None = None,
        counted: str = "n",
        prompt_logprobs: int | None = None,
        prompt_only: bool = False,
        effort: str | None = None,
        tools: ToolRequest = NO_TOOLS,
        chat: ChatOptions = DEFAULT_OPTIONS.chat,
    ) -> Generation:
        """Returns what a request asks of the engine.

        Raises RequestError for values that are wrong whatever the prompt is."""
        if num_choices is None:
            num_choices = 1 if body.n is None else body.n
        self.check_count(len(prompts), num_choices, counted)
        if body.stream_options is not None and not body.stream:
            raise FieldError("stream_options", "only allowed together with stream")
        budget = self.effort_budgets.get(effort or "")
        params = self._sampling_params(body, max_tokens=max_tokens, logprobs=logprobs, budget=budget)
        grammar_field, grammar = _grammar(body, tools)
        params = params.replace(grammar=grammar, prompt_logprobs=prompt_logprobs)
        params.check(self.card.vocab_size)
        if keep_last := self._keep_last(body.truncate_prompt_tokens):
            prompts = tuple(prompt[-keep_last:] if isinstance(prompt, list) else prompt for prompt in prompts)
        parts = self.parts_of(body.model)
        if session := body.session_id or body.prompt_cache_key or "":
            parts = {**parts, **self.session_parts(session, body.prompt_cache_ttl_s or 0.0)}
        options = RequestOptions(
            keep_last=keep_last,
            echo=echo,
            priority=body.priority or 0,
            cache_salt=body.cache_salt or "",
            chat=chat,
            prompt_only=prompt_only,
            return_prompt_ids=bool(body.return_token_ids),
            origin=tenant_of(body.user),
            parts=parts,
        )
        return Generation(
            prompts=prompts,
            params=params,
            options=options,
            num_choices=num_choices,
            grammar_field=grammar_field,
            stream=bool(body.stream),
            new_parser=tools.new_parser(params.grammar),
            names_tokens_by_id=bool(body.return_tokens_as_token_ids),
            request_id=body.request_id or body.rid or "",
            session=session,
        )

    def parts_of(self, name: str | None) -> dict[str, RequestPart]:
        """Returns the parts of a request for ``name``; none for the model itself.  Raises RequestError (404).

        A variant may be gone between two looks: what is none by now never stands for the model."""
        if name is None or name == self.card.name:
            return {}
        if (variant := self.variants.get(name)) is None:
            if name in ANY_MODEL:
                return {}
            more = f" and {len(self.variants)} adapters, which GET /v1/models names" if self.variants else ""
            raise RequestError(
                f"the model '{name[:100]}' does not exist; this server has '{self.card.name}'{more}",
                status=404,
                code="model_not_found",
                param="model",
            )
        return variant.parts

    def check_model(self, name: str | None) -> None:
        """Raise RequestError (404) unless ``name`` is the served model or a variant of it, or none is named."""
        self.parts_of(name)

    def check_count(self, num_prompts: int, num_choices: int, counted: str) -> None:
        """Raise RequestError for more choices than one request may have.  counted: the field that says how many."""
        if not 1 <= num_choices <= MAX_CHOICES:
            raise RequestError(f"{counted}={num_choices}: must be from 1 to {MAX_CHOICES}", param=counted)
        if num_prompts * num_choices > MAX_CHOICES:
            raise RequestError(
                f"{num_prompts} prompts with {counted}={num_choices} make {num_prompts * num_choices} choices; "
                f"at most {MAX_CHOICES} are allowed in one request",
                param="prompt" if num_choices == 1 and counted == "n" else counted,
            )

    def _keep_last(self, given: int | None) -> int:
        """Returns how many tokens of a prompt are read; 0 for all.  -1 is as many as the context has, as in vLLM."""
        most = self.card.max_model_len
        if given is None:
            return 0
        if given != -1 and not 1 <= given <= most:
            raise FieldError("truncate_prompt_tokens", f"{given}: must be from 1 to {most}, or -1 for that")
        return most if given == -1 else given

    def _sampling_params(
        self, body: GenerationBody, *, max_tokens: int | None, logprobs: int | None, budget: int | None
    ) -> SamplingParams:
        """Returns the body's parameters.  budget: of thoughts, if the body has none."""
        given = {name: value for name in SAME_FIELDS if (value := getattr(body, name)) is not None}
        given.update(max_tokens=max_tokens, logprobs=logprobs, seed=own_seed(body.seed))
        budgets = body.thinking_token_budget, body.max_thinking_tokens, budget
        if (budget := next((one for one in budgets if one is not None), None)) is not None:
            if self.limit_thoughts is None:
                raise FieldError("thinking_token_budget", NO_BUDGET, code="unsupported_parameter")
            given["logits_processors"] = {**given.get("logits_processors", {}), **self.limit_thoughts(budget)}
        return SamplingParams(**{**self.card.chat_defaults, **given})


def _no_parts(name: str, ttl_s: float) -> dict[str, RequestPart]:
    return {}


def own_seed(seed: int | None) -> int | None:
    """Returns a client's seed as one of ours, which begin at 0.  -1 is none, as it is elsewhere."""
    if seed == NO_SEED:
        return None
    return seed & MAX_SEED if seed is not None and LEAST_SEED <= seed < 0 else seed


def _grammar(body: GenerationBody, tools: ToolRequest) -> tuple[str, Grammar | None]:
    """(the field that asks for it, the grammar)."""
    named = read_grammar(body)
    if named is not None and named[1].kind == "structural_tag" and tools.tools:
        raise FieldError(named[0], "not possible together with tools, which say themselves how calls are written")
    grammar = tools.grammar(None if named is None else named[1])
    if grammar is None:
        return "", None
    field = "tools" if named is None or tools.forced else named[0]
    if len(grammar.source) > MAX_GRAMMAR_CHARS:
        raise FieldError(field, f"longer than {MAX_GRAMMAR_CHARS} characters")
    if body.ignore_eos:
        raise FieldError("ignore_eos", f"not possible together with {field}, which says where to end")
    return field, grammar


def read_grammar(body: GenerationBody) -> Named | None:
    """(field, grammar), or None if the output is free.  Raises RequestError."""
    found = list(_all(body))
    if len(found) > 1:
        names = " and ".join(name for name, _ in found)
        raise RequestError(f"{names}: only one of them can be followed", param=found[1][0])
    return found[0] if found else None


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
    if body.structural_tag:
        yield "structural_tag", decode_structural_tag(body.structural_tag, "structural_tag")


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
        case "structural_tag":
            return read_structural_tag(given, "response_format")
    raise FieldError(
        "response_format.type",
        "must be 'text', 'json_object', 'json_schema' or 'structural_tag'",
        code="unsupported_parameter",
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
    if given.structural_tag:
        yield f"{prefix}.structural_tag", decode_structural_tag(given.structural_tag, f"{prefix}.structural_tag")


def _of_schema(raw: msgspec.Raw) -> Grammar:
    """A schema may come as JSON or as a string that holds JSON."""
    source = bytes(raw).decode()
    return Grammar("json_schema", msgspec.json.decode(source, type=str) if source.startswith('"') else source)


def _of_choices(choices: list[str]) -> Grammar:
    return Grammar("choice", msgspec.json.encode(choices).decode())
