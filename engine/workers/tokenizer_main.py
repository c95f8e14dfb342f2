"""The process of one tokenizer: ``python -m engine.workers.tokenizer_main``, started only by the engine.

Owns: its life, from the ticket to its exit code, and the files it reads at its start.  Does not know: other tokenizers,
restarts.  It imports no torch.
"""

import asyncio
from pathlib import Path

from engine.actors.tokenizer import Tokenizer
from engine.checkpoints.checkpoint import ModelSpec
from engine.config import Config
from engine.messages import Abort, Admit, Deltas, Failed
from engine.plugins.families import read_model
from engine.plugins.kinds import GRAMMAR, LOGITS_PROCESSOR, chosen_plugins
from engine.plugins.manager import Plugins
from engine.plugins.parsers import plugin_codec
from engine.plugins.structured import plugin_forms
from engine.text.codec import TextCodec
from engine.text.forms import OutputForms
from engine.types.errors import CallboardError
from engine.workers.child import Ticket, enter
from engine.workers.main import Outgoing, WorkerProcess
from engine.workers.messages import TokenizerAssignment, TokenizerProcessInbox, WorkerReady
from engine.workers.wire import WireError, in_parts

CAPACITY = 1 << 18  # messages of the link: four for each of the most open requests


def main() -> None:
    """Serve, then exit with the process's exit code."""
    enter(lambda ticket: TokenizerProcess(ticket).run())


class TokenizerProcess(WorkerProcess[TokenizerAssignment]):
    """A tokenizer actor, with a link in place of ingress and scheduler."""

    def __init__(self, ticket: Ticket) -> None:
        super().__init__(ticket, assignment=TokenizerAssignment, accepts=TokenizerProcessInbox, capacity=CAPACITY)

    async def build(self, assignment: TokenizerAssignment, outgoing: Outgoing) -> Tokenizer:
        """Return the tokenizer.  Files are read on another thread, so that heartbeats continue meanwhile."""
        spec, codec, forms = await asyncio.to_thread(load_text, assignment.config)
        tokenizer = Tokenizer(
            capacity=assignment.capacity,
            codec=codec,
            vocab_size=spec.vocab_size,
            forms=forms,
        )
        link = TextLink(outgoing)
        tokenizer.connect(scheduler=link, ingress=link)
        outgoing.put(WorkerReady())
        return tokenizer


class TextLink:
    """The receiver of the tokenizer's messages.

    A message too large for a frame is sent in parts; if it cannot be cut, only its request fails: log probabilities of
    prompts can be that large."""

    def __init__(self, outgoing: Outgoing) -> None:
        self._outgoing = outgoing

    def put(self, message: Admit | Abort | Deltas | Failed) -> None:
        """Send."""
        try:
            self._outgoing.link.put(message)
        except WireError as error:
            self._put_smaller(message, error)
        except CallboardError as error:
            self._outgoing.fail(error)

    def _put_smaller(self, message: Admit | Abort | Deltas | Failed, error: WireError) -> None:
        if isinstance(message, Deltas):
            for part in in_parts(message, error):
                self.put(part)
        elif isinstance(message, Admit):
            self.put(
                Failed(
                    request_id=message.request_id,
                    message=f"the prompt is too large: {error}",
                    status=413,
                    code="request_too_large",
                )
            )
        else:
            self._outgoing.fail(error)


def load_text(config: Config) -> tuple[ModelSpec, TextCodec, OutputForms]:
    """Return what a tokenizer needs.  config: with the model's path resolved.  Raises CallboardError."""
    directory = Path(config.model.path)
    spec = read_model(directory, config.plugins, config.model)
    codec = plugin_codec(config, directory, spec.use)
    # Only the plugins that are needed here: others may need a device.
    chosen = chosen_plugins(config)
    plugins = Plugins({kind: chosen[kind] for kind in (GRAMMAR, LOGITS_PROCESSOR)}, config.plugins.options)
    forms = plugin_forms(plugins, lambda: codec, vocab_size=spec.vocab_size, eos_token_ids=spec.eos_token_ids)
    return spec, codec, forms


if __name__ == "__main__":
    main()
