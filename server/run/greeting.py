"""The lines that ``callboard serve`` prints once it is ready: where it is, and a first request to copy.

Owns: the words.  Does not know: how the engine was started.
"""

import json
import logging
import sys
from typing import TYPE_CHECKING

from engine.host.logs import FIELDS, JSONFormatter, LogSettings
from server.model_card import about
from server.openai.chat import Chat
from server.run.core import all_parts
from server.run.extension import FirstRequest

if TYPE_CHECKING:
    from engine.control.system import System

log = logging.getLogger(__name__)

QUESTION = "What is the capital of France?"
NO_REQUEST: FirstRequest = ("/v1/models", {})  # where no part answers for this kind of model
QUESTION_FOR_A_TOY = "What is a page?"  # the demo model knows what it was taught and nothing else


def greet(system: "System", url: str, *, needs_key: bool, token: str = "", took_s: float) -> None:
    """Print it to standard output, as an object where logs are objects.

    token: opens the operators' routes on this machine; it is printed on a terminal alone, for the page."""
    kind = system.spec.use.kind
    path, fields = next((part.first_requests[kind] for part in all_parts() if kind in part.first_requests), NO_REQUEST)
    toy = about(system.engine.num_parameters)
    if kind == "generate" and system.codec.template_source:
        messages = [{"role": "user", "content": QUESTION_FOR_A_TOY if toy else QUESTION}]
        path, fields = Chat.operation.path, {"messages": messages, "max_tokens": 64, "temperature": 0}
    body = json.dumps({"model": system.model_name, **fields})
    ready = f"{system.model_name}{f', {toy},' if toy else ''} is ready after {took_s:.1f} s at {url}"
    key = ' -H "Authorization: Bearer $CALLBOARD_KEY"' if needs_key else ""
    sent = f" -H 'Content-Type: application/json' -d '{body}'" if fields else ""
    curl = f"curl {url}{path}{key}{sent}"
    if LogSettings.here().style == "json":
        # A reader of standard output with standard error gets nothing but objects.
        said = log.makeRecord(log.name, logging.INFO, "", 0, ready, (), None, extra={FIELDS: {"url": url, "try": curl}})
        print(JSONFormatter().format(said), flush=True)
    else:
        page = f"page:\n  {url}/#key={token}\n" if token and sys.stdout.isatty() else ""
        print(f"\n{ready}\n{page}try:\n  {curl}\n", flush=True)
