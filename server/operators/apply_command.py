"""``callboard apply``: sends a configuration to a server that runs, and prints what has changed.

Owns: the command's own arguments, the request, what a person reads.  Does not know: what a setting means.
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

DESCRIPTION = """\
Gives a server that runs another configuration, under its streams.  The file is a whole configuration: what it leaves
out goes back to its default.  Settings of the server's own command line and environment stay above it.  What names a
place (model.path, folders, options of plugins) changes by the file that the server was started with alone: without
FILE.toml, the server reads that one again.
"""
EPILOG = """\
examples:
  callboard apply new.toml --dry-run
  callboard apply new.toml --url http://other:8000 --key sk-...
  callboard apply --url http://other:8000

`callboard config FILE.toml` prints a whole configuration; docs/operations.md says what can change, and how.
Exit codes: 0 done, 1 no answer, or the server failed, 2 refused.
"""
LOOPBACK = frozenset({"127.0.0.1", "::1", "localhost"})
TIMEOUT_S = 3600.0  # loading a large model takes its time
ROADS = {
    "none": "nothing differs",
    "live": "at once",
    "beside": "new executors load beside the old ones, and streams move over",
    "after": "new executors load when the old ones have ended, and streams wait",
}


def add_arguments(command: argparse.ArgumentParser) -> None:
    """What this command takes."""
    command.description, command.epilog = DESCRIPTION, EPILOG
    command.formatter_class = argparse.RawDescriptionHelpFormatter
    command.add_argument("target", nargs="?", metavar="FILE.toml", help="the settings that are to be")
    command.add_argument("--dry-run", action="store_true", help="only say what would change")
    command.add_argument("--url", help="the server's address (default: server.host and server.port of the file)")
    command.add_argument(
        "--key",
        help="key of an operator (default: server.operator_key, or on this machine its server's token)",
    )


def apply(file: str | None, config: Config, *, url: str | None, key: str | None, dry_run: bool) -> None:
    """Ask the server.  file: None for the server's own.  config: what it comes to here.

    Raises ConfigError for settings that the server refuses."""
    if file is not None and Path(file).suffix != ".toml":
        raise ConfigError("callboard apply needs a .toml file, with all settings that are to be")
    host = f"[{config.server.host}]" if ":" in config.server.host else config.server.host
    base = url or f"{host}:{config.server.port}"
    base = base if "://" in base else f"{config.server.scheme}://{base}"
    key = key or config.server.operator_key or (read_token() if _is_here(base) else "")
    ask = {"dry_run": dry_run} if file is None else {"toml": Path(file).read_text(), "dry_run": dry_run}
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
