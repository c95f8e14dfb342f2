"""The forms of output that requests may demand, as the tokenizer checks them: a grammar, logits processors.

Owns: the check of a request's parameters.  Does not know: any library, devices, how a form is kept to.
"""

from dataclasses import dataclass, field

import msgspec

from engine.text.grammar import Grammars
from engine.text.processors import Processors
from engine.text.reasoning import Thinking
from engine.types.errors import RequestError
from engine.types.params import SamplingParams


@dataclass(frozen=True, slots=True)
class OutputForms:
    """The forms of output of one engine.  grammars: None if no plugin compiles them."""

    grammars: Grammars | None = None
    processors: Processors = field(default_factory=lambda: Processors({}))

    def checked(self, params: SamplingParams, begins: Thinking) -> tuple[SamplingParams, float]:
        """Return the parameters with the state in which the output begins, and the seconds that compiling took.

        Raises RequestError if the engine cannot keep to a form."""
        if params.logits_processors:
            self.processors.read(params.logits_processors)
        if params.grammar is None:
            return params, 0.0
        if self.grammars is None:
            raise RequestError("structured output: this engine has no grammar plugin", code="unsupported_parameter")
        grammar = msgspec.structs.replace(params.grammar, thinking=begins)
        return params.replace(grammar=grammar), self.grammars.check(grammar)
