"""The part of the section [server] about Anthropic's API."""

from typing import Annotated, ClassVar

from engine.settings.section import Addition, key


class MessagesSettings(Addition, frozen=True):
    """The part of [server] about Anthropic's API."""

    table: ClassVar[str] = "server"

    leave_out_billing_header: Annotated[bool, key(
        "Leave the line x-anthropic-billing-header out of the system prompt of Claude Code: it changes with sessions "
        "and requests, and nothing behind it would be found in the cache"
    )] = True
