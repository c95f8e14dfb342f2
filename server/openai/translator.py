"""Request fields as what they ask of the engine.

Owns: how fields become sampling parameters, and what is wrong whatever the prompt is.
Does not know: JSON, prompts' formats, responses.  Every field is copied by hand: a name that clients may send
never reaches the engine because it happens to exist there.
"""

from typing import TypeVar

from engine.errors import FieldError, RequestError
from engine.messages import DEFAULT_OPTIONS, ChatOptions, Prompt, RequestOptions
from engine.params import MAX_GRAMMAR_CHARS, MAX_SEED, Grammar, SamplingParams
from server.generate.generation import MAX_CHOICES, Generation
from server.model_card import ModelCard
from server.openai.formats import read_grammar
from server.openai.requests import GenerationBody
from server.openai.tools import NO_TOOLS, ToolRequest

T = TypeVar("T")
DEFAULT = SamplingParams()
LEAST_SEED = -(1 << 63)
NO_SEED = -1  # to vLLM and llama.cpp


class Translator:
    """Turns request bodies into generations for one model, which ``card`` describes."""

    def __init__(self, card: ModelCard) -> None:
        self.card = card

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
        params = self._sampling_params(body, max_tokens=max_tokens, logprobs=logprobs)
        params = params.replace(grammar=_grammar(body, tools), prompt_logprobs=prompt_logprobs)
        params.check(self.card.vocab_size)
        options = RequestOptions(
            echo=echo,
            priority=body.priority or 0,
            cache_salt=body.cache_salt or "",
            chat=chat,
            prompt_only=prompt_only,
            return_prompt_ids=bool(body.return_token_ids),
        )
        return Generation(
            prompts=prompts,
            params=params,
            options=options,
            num_choices=num_choices,
            stream=bool(body.stream),
            new_parser=tools.new_parser(params.grammar),
            names_tokens_by_id=bool(body.return_tokens_as_token_ids),
            request_id=body.request_id or body.rid or "",
        )

    def check_model(self, name: str | None) -> None:
        """Raise RequestError (404) unless ``name`` is the served model, or none is named."""
        if name not in (None, self.card.name):
            raise RequestError(
                f"the model '{name[:100]}' does not exist; this server has '{self.card.name}'",
                status=404,
                code="model_not_found",
                param="model",
            )

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

    def _sampling_params(self, body: GenerationBody, *, max_tokens: int | None, logprobs: int | None) -> SamplingParams:
        model = self.card.chat_defaults
        stop = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
        return SamplingParams(
            max_tokens=max_tokens,
            min_tokens=_given(body.min_tokens, DEFAULT.min_tokens),
            temperature=_given(body.temperature, float(model.get("temperature", DEFAULT.temperature))),
            top_k=_given(body.top_k, int(model.get("top_k", DEFAULT.top_k))),
            top_p=_given(body.top_p, float(model.get("top_p", DEFAULT.top_p))),
            min_p=_given(body.min_p, DEFAULT.min_p),
            repetition_penalty=_given(
                body.repetition_penalty, float(model.get("repetition_penalty", DEFAULT.repetition_penalty))
            ),
            presence_penalty=_given(body.presence_penalty, DEFAULT.presence_penalty),
            frequency_penalty=_given(body.frequency_penalty, DEFAULT.frequency_penalty),
            logit_bias=body.logit_bias or {},
            seed=own_seed(body.seed),
            logprobs=logprobs,
            ignore_eos=_given(body.ignore_eos, DEFAULT.ignore_eos),
            stop=stop,
            stop_token_ids=tuple(body.stop_token_ids or ()),
            include_stop_str_in_output=_given(body.include_stop_str_in_output, DEFAULT.include_stop_str_in_output),
            skip_special_tokens=_given(body.skip_special_tokens, DEFAULT.skip_special_tokens),
        )


def own_seed(seed: int | None) -> int | None:
    """Returns a client's seed as one of ours, which begin at 0.  -1 is none, as it is elsewhere."""
    if seed == NO_SEED:
        return None
    return seed & MAX_SEED if seed is not None and LEAST_SEED <= seed < 0 else seed


def _grammar(body: GenerationBody, tools: ToolRequest) -> Grammar | None:
    named = read_grammar(body)
    grammar = tools.grammar(None if named is None else named[1])
    if grammar is None:
        return None
    field = "tools" if named is None else named[0]
    if len(grammar.source) > MAX_GRAMMAR_CHARS:
        raise FieldError(field, f"longer than {MAX_GRAMMAR_CHARS} characters")
    if body.ignore_eos:
        raise FieldError("ignore_eos", f"not possible together with {field}, which says where to end")
    return grammar


def _given(value: T | None, default: T) -> T:
    return default if value is None else value
