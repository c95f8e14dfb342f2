"""The arguments of ``callboard chaos``."""

import argparse
from argparse import ArgumentParser
from pathlib import Path

from server.arguments import NO_CONFIGURATION, count, natural, picture, positive

DESCRIPTION = """\
Runs the service under faults in virtual time and says what it survived.

The schedulers, the KV cache and its tiers, tenants, the router, replicas, the hand-over of pages between engines, the
journal of streams and the supervisor are the ones that serve; the clock, the links between them, disks, the clients and
the device are simulated.  The device's tokens depend on every page that a request reads, so that a stale, foreign or
lost page is a wrong token.  A seed decides everything that happens: sizes, requests, delays, and which faults come
when.  Nothing is loaded, no port is opened, no file is read.

After each run a checker, which imports nothing of callboard, reads the log of the run and decides: did every request
end once, are the tokens those of the model, has every page one owner.
"""
EPILOG = """\
examples:
  callboard chaos
      a minute of faults, on all processors
  callboard chaos --minutes 10 --seed 7000
      other seeds, for longer
  callboard chaos --kind split --runs 1000
      a thousand runs of prefill and decode engines
  callboard chaos --only 7003 --log run.log
      one run, with its log; python server/extensions/chaos/checker.py run.log checks it without callboard
  callboard chaos --mutants
      the bugs that can be planted, and the issues of other engines that had one like it
  callboard chaos --mutant a_live_page_can_be_evicted
      plant one: which run finds it, and with how few operations it still shows
  callboard chaos --mutant all --kind split --json
      the same for every one that runs of a kind find, in some minutes; without --kind for all
  callboard chaos --recording incident.rec
      a recording of a server: replayed, its faults and its end

exit code: 0 if everything was survived (with --mutant: if the bug was found), else 1, with the seed and the few
operations that show the failure.
"""


KINDS = ("engine", "states", "workers", "fleet", "split", "rejoin")


def add_commands(commands: "argparse._SubParsersAction[ArgumentParser]") -> None:
    """Add the command."""
    parser = commands.add_parser(
        "chaos",
        help="run the service under faults in virtual time, and say what it survived",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--minutes", type=positive, default=1.0, metavar="M", help="how long to run (default: 1)")
    parser.add_argument("--runs", type=count, default=0, metavar="N", help="so many runs instead of minutes")
    parser.add_argument("--seed", type=natural, default=0, metavar="N", help="the number of the first run (default: 0)")
    parser.add_argument("--jobs", type=count, default=0, metavar="N", help="processes (default: one per processor)")
    parser.add_argument("--kind", choices=KINDS, default="", help="runs of this kind alone (default: all in turn)")
    parser.add_argument("--only", type=natural, metavar="N", help="one run, by its number")
    parser.add_argument("--operations", metavar="I,J", help="with --only: these operations of the run alone")
    parser.add_argument("--order", type=natural, default=0, help="with --only: the same with other delays on the links")
    parser.add_argument("--mutant", metavar="NAME", help="plant a known bug ('all': each in turn) and find it")
    parser.add_argument("--mutants", action="store_true", help="list the bugs that can be planted")
    parser.add_argument("--recording", type=Path, metavar="FILE", help="replay a recording of a server instead")
    parser.add_argument("--log", type=Path, metavar="FILE", help="with --only: write the log of the run")
    parser.add_argument("--json", action="store_true", help="print JSON instead")
    parser.add_argument("--plot", type=picture, metavar="PNG", help="with --only: draw the run; needs matplotlib")
    parser.add_argument("--lines", type=count, help=argparse.SUPPRESS)
    parser.set_defaults(run="server.extensions.chaos.command:chaos", **NO_CONFIGURATION)
