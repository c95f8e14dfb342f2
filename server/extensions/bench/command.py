"""``callboard bench``: measure a server from outside, the engine on this machine, or compare two results.

Owns: arguments, which result goes where.  Does not know: how anything is measured.
What measures is imported by the command that does it; ``serve`` and ``compare`` need no torch.
"""

import argparse
import asyncio
import json
import os
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from engine.config import Config
from engine.types.errors import CallboardError, ConfigError
from server.arguments import count, natural, picture, positive, share

if TYPE_CHECKING:
    from server.extensions.bench.loads import Conversation
    from server.extensions.bench.report import Result

EPILOG = """\
examples:
  callboard bench serve --rate 4 --requests 200 --prompt 512 --output 128 --slo ttft=0.5,tpot=0.05
  callboard bench serve --url http://other:8000 --concurrency 32 --turns 4 --prefix 1000
  callboard bench serve --trace monday.jsonl --save monday.json --plot monday.png
  callboard bench offline path/to/checkpoint --sequences 64 --longest 512
  callboard bench compare before.json after.json
"""
TOLD = ("requests", "prompt", "output", "variation", "prefix", "groups", "turns", "rate", "burst", "seed")
# What the other commands' shared arguments say, for those that read no configuration file.
NO_CONFIGURATION: dict[str, Any] = {
    "target": None, "model": None, "set": [], "log_level": "warning", "log_format": "text",
}  # fmt: skip


def add_bench(commands: "argparse._SubParsersAction[ArgumentParser]", *parents: ArgumentParser) -> None:
    """Add the command.  parents: the arguments of commands that load a model."""
    bench = commands.add_parser(
        "bench",
        help="measure a server, or the engine on this machine",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    kinds = bench.add_subparsers(required=True, metavar="KIND")
    _add_serve(kinds.add_parser("serve", help="send a load to an OpenAI-compatible server"))
    offline = kinds.add_parser("offline", parents=[*parents], help="run a batch on this machine, without HTTP")
    offline.add_argument("--sequences", type=count, default=256, help="of the batch (default: 256)")
    offline.add_argument("--longest", type=count, default=1024, help="prompt, and output (default: 1024 tokens)")
    offline.add_argument("--save", type=Path, metavar="FILE", help="write the result as JSON")
    offline.set_defaults(run=_offline)
    compare = kinds.add_parser("compare", help="compare two results, figure by figure")
    compare.add_argument("first", type=Path)
    compare.add_argument("second", type=Path)
    compare.add_argument("--plot", type=picture, metavar="PNG", help="draw both; needs matplotlib")
    compare.set_defaults(run=_compare, **NO_CONFIGURATION)


def _add_serve(parser: ArgumentParser) -> None:
    server = parser.add_argument_group("the server")
    server.add_argument(
        "--url", "--base-url", dest="base_url", default="http://127.0.0.1:8000", help="default: %(default)s"
    )
    server.add_argument("--model", dest="served", default="", help="default: the first one that the server lists")
    key = os.environ.get("OPENAI_API_KEY", "")
    server.add_argument("--key", "--api-key", dest="api_key", default=key, help="default: OPENAI_API_KEY")
    server.add_argument("--endpoint", choices=["chat", "completions"], default="chat", help="default: chat")
    server.add_argument("--field", action="append", default=[], metavar="NAME=JSON", help="what each body says besides")
    server.add_argument("--timeout", type=positive, default=600.0, metavar="S", help="of a request (default: 600)")
    load = parser.add_argument_group("the load")
    load.add_argument("--requests", type=count, default=100, help="conversations (default: 100)")
    load.add_argument("--prompt", type=count, default=128, help="words of a turn (default: 128)")
    load.add_argument("--output", type=count, default=128, help="most tokens of an answer (default: 128)")
    load.add_argument("--variation", type=share, default=0.0, help="0.5: lengths from half to 1.5 times that")
    load.add_argument("--prefix", type=natural, default=0, help="words that conversations begin with in common")
    load.add_argument("--groups", type=count, default=1, help="of conversations that share a prefix (default: 1)")
    load.add_argument("--turns", type=count, default=1, help="of a conversation (default: 1)")
    load.add_argument("--ignore-eos", action="store_true", help="answers of full length; not every server knows it")
    load.add_argument("--trace", type=Path, help="JSON lines instead: time, max_tokens, prompt or prompt_tokens")
    load.add_argument("--seed", type=natural, default=0, help="of the load (default: 0)")
    when = parser.add_mutually_exclusive_group()
    when.add_argument("--rate", type=positive, help="conversations a second, by a Poisson process")
    when.add_argument("--concurrency", type=count, help="so many at once, each after another (default: 16)")
    parser.add_argument("--burst", type=count, default=1, help="with --rate: so many begin together (default: 1)")
    parser.add_argument("--slo", default="", metavar="NAME=S,...", help="count what keeps to ttft=0.5,tpot=0.05,e2e=10")
    parser.add_argument("--save", type=Path, metavar="FILE", help="write the result as JSON")
    parser.add_argument("--plot", type=picture, metavar="PNG", help="draw it; needs matplotlib")
    parser.set_defaults(run=_serve, **NO_CONFIGURATION)


def _fields(parsed: Namespace) -> dict[str, Any]:
    fields: dict[str, Any] = {"ignore_eos": True} if parsed.ignore_eos else {}
    for given in parsed.field:
        name, _, value = given.partition("=")
        try:
            fields[name] = json.loads(value)
        except ValueError:
            right = "--field top_k=5 or --field 'user=\"ann\"'"
            raise ConfigError(f"--field {given}: the value is no JSON; write {right}") from None
    return fields


def _load(parsed: Namespace) -> "list[Conversation]":
    import numpy as np

    from server.extensions.bench.loads import LoadSizes, arrivals, draw, due, read_trace

    rng = np.random.default_rng(parsed.seed)
    if parsed.turns > 1 and parsed.endpoint != "chat":
        raise ConfigError("--turns above 1 needs --endpoint chat: a completion has no earlier turns")
    if parsed.burst > 1 and parsed.rate is None:
        raise ConfigError("--burst needs --rate, which says how many begin in a second")
    if parsed.trace is not None:
        if parsed.rate is not None:
            raise ConfigError("--rate and --trace both say when requests are sent; give one of them")
        return read_trace(parsed.trace, rng)
    sizes = LoadSizes(parsed.prompt, parsed.output, parsed.variation, parsed.prefix, parsed.groups, parsed.turns)
    load = draw(parsed.requests, sizes, rng)
    return load if parsed.rate is None else due(load, arrivals(len(load), parsed.rate, parsed.burst, rng))


def _serve(parsed: Namespace, config: Config) -> None:
    from server.extensions.bench import report
    from server.extensions.bench.client import Target
    from server.extensions.bench.machine import describe_machine
    from server.extensions.bench.run import run

    slo, load = report.parse_slo(parsed.slo), _load(parsed)
    is_open = parsed.rate is not None or (parsed.trace is not None and parsed.concurrency is None)
    concurrency = 0 if is_open else parsed.concurrency or 16
    chat = parsed.endpoint == "chat"
    target = Target(parsed.base_url, parsed.served, chat, parsed.api_key, parsed.timeout, _fields(parsed))
    model, records, seconds = asyncio.run(run(target, load, concurrency))
    figures, errors = report.summarise(records, seconds, slo)
    asked = {name: getattr(parsed, name) for name in TOLD} if parsed.trace is None else {"trace": parsed.trace.name}
    asked |= {"model": model, "endpoint": parsed.endpoint, "fields": target.fields}
    asked |= {"concurrency": concurrency or None, "slo": parsed.slo}
    result = report.Result("serve", describe_machine(), asked, figures, errors, report.requests_of(records))
    _publish(result, parsed)
    if figures["failed"] == figures["requests"]:
        raise CallboardError("every request failed; the lines above say how")


def _offline(parsed: Namespace, config: Config) -> None:
    from server.extensions.bench import offline, report
    from server.extensions.bench.machine import describe_machine

    asked, figures = offline.run(config, parsed.sequences, parsed.longest)
    _publish(report.Result("offline", describe_machine(), asked, figures), parsed)


def _publish(result: "Result", parsed: Namespace) -> None:
    from server.extensions.bench import report

    report.show(result, Console())
    if parsed.save is not None:
        report.write(result, parsed.save)
    if getattr(parsed, "plot", None) is not None:
        report.plot({str(result.load["model"]): result}, parsed.plot)


def _compare(parsed: Namespace, config: Config) -> None:
    from server.extensions.bench import report

    first, second = report.read(parsed.first), report.read(parsed.second)
    report.compare(first, second, Console())
    if parsed.plot is not None:
        paths = parsed.first, parsed.second
        names = [path.stem for path in paths] if parsed.first.stem != parsed.second.stem else map(str, paths)
        report.plot(dict(zip(names, (first, second), strict=True)), parsed.plot)
