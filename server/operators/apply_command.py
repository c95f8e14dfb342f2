"""``callboard apply``: sends a configuration to a server that runs, and prints what has changed.

Owns: the request, what a person reads.  Does not know: what a setting means.
"""

import argparse
import asyncio
import json
import os
from http import HTTPStatus
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
from rich.console import Console
from rich.table import Table
from yarl import URL

from engine.config import Config
from engine.control.changeover import Outcome
from engine.types.errors import CallboardError, ConfigError
from server.local_token import read_token

LOOPBACK = frozenset({"127.0.0.1", "::1", "localhost"})
TIMEOUT_S = 3600.0  # loading a large model takes its time
ROADS = {
    "none": "nothing differs",
    "live": "at once",
    "beside": "new executors load beside the old ones, and streams move over",
    "after": "new executors load when the old ones have ended, and streams wait",
}


def apply(parsed: argparse.Namespace, config: Config) -> None:
    """Send the file that is named, or none for the server's own.  config: what it comes to here.

    Raises ConfigError for settings that the server refuses."""
    file: str | None = parsed.target
    if file is not None and Path(file).suffix != ".toml":
        raise ConfigError("callboard apply needs a .toml file, with all settings that are to be")
    host = f"[{config.server.host}]" if ":" in config.server.host else config.server.host
    base = parsed.url or f"{host}:{config.server.port}"
    base = base if "://" in base else f"{config.server.scheme}://{base}"
    key = parsed.key or config.server.operator_key or (read_token() if _is_here(base) else "")
    ask = {"dry_run": parsed.dry_run} if file is None else {"toml": Path(file).read_text(), "dry_run": parsed.dry_run}
    try:
        outcome = asyncio.run(_ask(f"{base.rstrip('/')}/apply", ask, key))
    except aiohttp.ClientSSLError as error:
        raise CallboardError(f"{base}: TLS failed: {error}") from None
    except aiohttp.ClientConnectorError as error:
        reason = error.strerror if isinstance(error, aiohttp.ClientConnectorDNSError) else os.strerror(error.errno or 0)
        raise CallboardError(f"{base}: no server answers there ({reason}); --url says where the server is") from None
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        raise CallboardError(f"{base}: {error or 'no answer'}; --url says where the server is") from None
    _show(outcome)


def _is_here(url: str) -> bool:
    """Whether it is this machine's server, which the token is for."""
    return URL(url).host in LOOPBACK


async def _ask(url: str, ask: dict[str, Any], key: str) -> Outcome:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
    async with aiohttp.ClientSession(timeout=timeout) as session, session.post(url, json=ask, headers=headers) as reply:
        body = await reply.read()
    if reply.status == HTTPStatus.OK:
        return msgspec.json.decode(body, type=Outcome)
    try:
        reason = json.loads(body)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        reason = reply.reason
    refused = ConfigError if reply.status == HTTPStatus.BAD_REQUEST else CallboardError
    raise refused(f"{url} answers {reply.status}: {reason}")


def _show(outcome: Outcome) -> None:
    table = Table("setting", "was", "is" if outcome.applied else "would be", "changes")
    for one in outcome.changes:
        table.add_row(one.key, json.dumps(one.before), json.dumps(one.after), one.changed)
    console = Console(highlight=False, markup=False)
    if outcome.changes:
        console.print(table)
    took = f", {outcome.took_s:.1f} s" if outcome.applied else ""
    console.print(f"{'applied' if outcome.applied else 'not applied'}: {ROADS[outcome.road]}{took}")
