"""Names of models as Ollama's clients write them.

Owns: the tag that is meant where none is given.  Does not know: which models there are.
"""

from server.openai.translator import Translator

LATEST = ":latest"


def served_name(asked: str, translator: Translator) -> str:
    """Returns the name by which this server knows a model.  Raises RequestError (404).

    Clients add ":latest" to a name without a tag."""
    known = {translator.card.name, *translator.variants}
    name = asked if asked in known else asked.removesuffix(LATEST)
    translator.check_model(name)
    return name
