"""The part of the section [model] about language models that serve as rerankers."""

from typing import Annotated, ClassVar

from engine.settings.section import Addition, key


class ScoreSettings(Addition, frozen=True):
    """The part of [model] about language models that serve as rerankers."""

    table: ClassVar[str] = "model"

    score_tokens: Annotated[tuple[str, ...], key(
        "Serves a language model as a reranker: a score is the first token's logit less the second's, as [\"yes\", "
        '"no"] for Qwen3-Reranker; empty for those of the checkpoint', max_length=2
    )] = ()
    score_template: Annotated[str, key(
        "File of a Jinja template that renders a message with role query and one with role document as a prompt; "
        "empty for the checkpoint's chat template if it knows these roles", is_place=True
    )] = ""
