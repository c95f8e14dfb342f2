"""The arguments of ``callboard whatif``."""

import argparse
from argparse import ArgumentParser
from pathlib import Path

from server.arguments import NO_CONFIGURATION, count, picture

DESCRIPTION = """\
Plays recorded traffic through the scheduler in virtual time, with other settings, and says what clients would have
seen.  A server records it where its configuration has

  [storage]
  folder = "/var/lib/callboard"
  trace_mb = 100

as files below /var/lib/callboard/traces: when requests came, how long they were, which prefixes they share and how long
steps took, and no text.  The model is not needed here, and nothing is loaded.
"""
EPILOG = """\
examples:
  callboard whatif trace.jsonl
      only what was, and its replay: how well this trace can be predicted at all
  callboard whatif trace.jsonl --set kv.num_pages=2000 --set plugins.policy=fair
      another server with both changes
  callboard whatif trace.jsonl --case scheduler.max_running=16 --case scheduler.max_running=32 kv.num_pages=2000
      two other servers; what --set says holds for both
  callboard whatif trace.jsonl --set scheduler.max_running=16 --plot out.png --json > out.json

What can be asked is what the scheduler decides by: kv.num_pages, page_size and num_host_pages, most of [scheduler],
plugins.policy, eviction, snapshots and their options, most of [limits].  What changes how long a step takes (backend,
dtype, threads) has to be measured: callboard bench.
The time to the first token counts from when the scheduler has the prompt's tokens, as in /metrics; what HTTP and the
tokenizer add is the same for all.
"""


def add_commands(commands: "argparse._SubParsersAction[ArgumentParser]") -> None:
    """Add the command."""
    parser = commands.add_parser(
        "whatif",
        help="predict recorded traffic with other settings",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("trace", type=Path, help="a file that a server has written")
    changes = "change a setting, e.g. kv.num_pages=2000; may be repeated"
    parser.add_argument("--set", dest="changes", action="append", default=[], metavar="SECTION.KEY=VALUE", help=changes)
    case = "the changes of one other server beside --set's; repeated, one column for each"
    parser.add_argument("--case", dest="cases", action="append", nargs="+", default=[], metavar="CHANGE", help=case)
    clients = "so many clients, each of which sends a request when its last one has ended, instead of recorded arrivals"
    parser.add_argument("--concurrency", type=count, default=0, metavar="N", help=clients)
    parser.add_argument("--json", action="store_true", help="print JSON instead, with every request")
    parser.add_argument("--plot", type=picture, metavar="PNG", help="draw all servers; needs matplotlib")
    parser.set_defaults(run="server.extensions.whatif.command:whatif", **NO_CONFIGURATION)
