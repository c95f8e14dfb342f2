"""What a client may tell the model's chat template.

Owns: which names, and that values are plain.  Does not know: templates, what the names mean to them.
"""

from collections.abc import Collection, Mapping

import msgspec

from engine.errors import RequestError

FIELD = "chat_template_kwargs"


def read_variables(given: Mapping[str, object] | None, reasoning_effort: str | None, allowed: Collection[str]) -> str:
    """A JSON object; empty for nothing.  Raises RequestError for a name that is not allowed.

    A template is a program, so clients cannot set whatever it reads: only what the configuration lists."""
    variables = dict(given or {})
    for name in variables:
        if name not in allowed:
            raise RequestError(
                f"{FIELD}.{name[:100]}: not taken; known are {', '.join(allowed)} (server.allowed_template_variables)",
                code="unsupported_parameter",
                param=FIELD,
            )
    if reasoning_effort is not None:
        variables.setdefault("reasoning_effort", reasoning_effort)
    return msgspec.json.encode(variables).decode() if variables else ""
