"""Fields that would change the output and that this server cannot honour.

Owns: their names, and the values that mean "not asked for".  Does not know: the fields it can honour.
Other unknown fields are let through, since client libraries add some; but output that silently ignores a
constraint looks right and is wrong, so those are refused by name.
"""

from collections.abc import Collection, Mapping
from typing import Any

import msgspec

from engine.errors import FieldError

NEUTRAL: tuple[Any, ...] = (None, False, "", [], {})  # of any field below
# Field -> which other values are neutral.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys((
        "allowed_token_ids", "audio", "audio_data", "bad_words", "chat_template", "custom_logit_processor",
        "documents", "echo", "extra_key", "functions", "grammar", "image_data", "input_embeds", "logits_processors",
        "logprob_token_ids", "lora_path", "max_new_tokens", "min_new_tokens", "no_stop_trim", "prompt_embeds",
        "prompt_logprobs", "return_hidden_states", "session_params", "stop_regex", "structural_tag", "suffix",
        "thinking_token_budget", "token_ids_logprob", "tools", "truncate_prompt_tokens", "use_beam_search",
        "video_data", "web_search_options",
    ), ()),
    "best_of": (1,), "function_call": ("none", "auto"), "modalities": (["text"],),
}  # fmt: skip
UNSUPPORTED_PREFIX = "guided_"


def check_unsupported(fields: Mapping[str, msgspec.Raw], known: Collection[str]) -> None:
    """Raise RequestError for the first field that asks for what cannot be done.  known: fields of the body's type."""
    for name, raw in fields.items():
        if name in known or (name not in UNSUPPORTED and not name.startswith(UNSUPPORTED_PREFIX)):
            continue
        value = msgspec.json.decode(raw)
        # The types are compared too, since False == 0 and True == 1.
        neutral = (type(value) is type(one) and value == one for one in (*NEUTRAL, *UNSUPPORTED.get(name, ())))
        if not any(neutral):
            shown = name[:100]
            raise FieldError(
                shown,
                "not supported by this server, and ignoring it would change the output",
                code="unsupported_parameter",
            )
