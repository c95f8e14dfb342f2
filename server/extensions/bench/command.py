"""``callboard bench``: measure a server from outside, the engine on this machine, or compare two results.

Owns: which result goes where.  Does not know: how anything is measured.
What measures is imported by the command that does it; ``serve`` and ``compare`` need no torch.
"""

import asyncio
import json
import shutil
from argparse import Namespace
from typing import TYPE_CHECKING, Any

from rich.console import Console

from engine.config import Config
from engine.types.errors import CallboardError, ConfigError

if TYPE_CHECKING:
    from server.extensions.bench.loads import Conversation
    from server.extensions.bench.report import Result

TOLD = ("requests", "prompt", "output", "variation", "prefix", "groups", "turns", "rate", "burst", "seed")


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


def serve(parsed: Namespace, config: Config) -> None:
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


def offline(parsed: Namespace, config: Config) -> None:
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


def compare(parsed: Namespace, config: Config) -> None:
    from server.extensions.bench import report

    first, second = report.read(parsed.first), report.read(parsed.second)
    report.compare(first, second, Console())
    if parsed.plot is not None:
        paths = parsed.first, parsed.second
        names = [path.stem for path in paths] if parsed.first.stem != parsed.second.stem else map(str, paths)
        report.plot(dict(zip(names, (first, second), strict=True)), parsed.plot)


def league(parsed: Namespace, config: Config) -> None:
    from server.extensions.bench import league, llama_cpp

    for path in (parsed.save, parsed.plot):
        if path is not None and not path.parent.is_dir():
            raise ConfigError(f"{path}: there is no folder {path.parent}; make it first")
    llama = {"llama.cpp": llama_cpp.find(parsed.llama_server, parsed.llama_python)}
    if parsed.ik_llama_server:
        if (binary := shutil.which(parsed.ik_llama_server)) is None:
            raise ConfigError(f"--ik-llama-server {parsed.ik_llama_server}: is no program that can be run")
        llama["ik_llama.cpp"] = [binary]
    llama = {name: command for name, command in llama.items() if command}
    if shutil.which(parsed.transformers_python) is None:
        raise ConfigError(f"--transformers-python {parsed.transformers_python}: is no program that can be run")
    entry = league.LeagueServers(
        parsed.precisions, llama, parsed.transformers_python, parsed.threads, max(parsed.streams)
    )
    rows = [
        row
        for model in parsed.models
        for row in league.compete(model, entry, parsed.loads, parsed.streams, parsed.turns)
    ]
    league.show(rows, Console())
    if parsed.save is not None:
        league.write(rows, parsed.save)
    if parsed.plot is not None:
        league.plot(rows, parsed.plot)
