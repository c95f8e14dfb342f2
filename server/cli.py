"""The ``callboard`` command and its subcommands, from serve to replay.

Owns: arguments, exit codes, what a person at a terminal sees.  Does not know: how the engine does any of it.
torch is imported only by the commands that run a model, and by the one that says which plugins could run here.
"""

import argparse
import asyncio
import errno
import gc
import json
import logging
import os
import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec
import uvloop
from rich.console import Console
from rich.table import Table

from engine import __version__
from engine.checkpoints.checkpoint import DESCRIPTION, resolve_checkpoint
from engine.checkpoints.shards import PICKLED
from engine.config import Config, ConfigSource, SeveralModels, json_schema, load_config, load_served, render_toml
from engine.host.logs import LogSettings
from engine.plugins.families import THROUGH, list_families, read_model
from engine.plugins.hookspecs import API_VERSION
from engine.plugins.listing import list_plugins
from engine.plugins.verdict import how_served
from engine.settings.sections import ServerSection
from engine.types.errors import CallboardError, ConfigError, PluginError, RequestError
from engine.types.params import SamplingParams
from server.arguments import add_command, count, log_arguments, natural, real, shared_arguments, target_argument
from server.backend import Backend
from server.foreign_flags import answers
from server.http.listener import bind, url_of
from server.http.tls import Tls
from server.keys import read_keys
from server.local_token import read_token
from server.model_card import ModelCard
from server.operators.apply_command import add_arguments, apply
from server.run.extension import described, find_extensions
from server.run.greeting import greet
from server.run.serve import serve, serve_from_process

if TYPE_CHECKING:
    from engine.control.system import System
    from engine.llm import LLM
    from engine.workers.placement import Machines

OF_CHECKPOINTS = (".safetensors", ".json", *PICKLED)  # ends of files that are no configuration, and no model alone
FRONT_MODULE = "server.run.frontend_process"  # the engine starts it, and knows it by name alone
GENERATING: dict[str, float] = {"temperature": 0.7}
# Without them the answers of small models wander off; a checkpoint that recommends any parameter knows better.
CHATTING: dict[str, float] = {"temperature": 0.7, "top_p": 0.95, "min_p": 0.05}
EPILOG = """\
examples:
  callboard serve Qwen/Qwen3-0.6B
  callboard serve examples/demo.toml --port 8001 --set kv.page_size=64
  callboard generate "def fibonacci(n):" --max-tokens 64 --temperature 0
  callboard chat path/to/checkpoint
  callboard config > callboard.toml

MODEL_OR_FILE is a model (a directory, a .gguf file, or org/name on the hub) or a configuration (a .toml file, which
may be given beside --model).  Settings come from the file, then CALLBOARD_SECTION__KEY variables, then --model, --set.
Exit codes: 0 done, 1 engine failed, 2 configuration, 3 checkpoint, 4 graphs, 98 port in use, 130 interrupted.
"""


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point of the console script; exits with the code that the error carries."""
    _fill_standard_streams()
    parsed = _parsed(sys.argv[1:] if arguments is None else arguments)
    LogSettings(logging.getLevelNamesMapping()[parsed.log_level.upper()], parsed.log_format).apply()
    try:
        parsed.run(parsed, _configuration(parsed))
        sys.stdout.flush()
    except CallboardError as error:
        print(f"callboard: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        # The reader of our output left (``callboard config | head``): there is nothing to report.
        _drop_output()
    except OSError as error:
        if error.errno != errno.ENOSPC or error.filename is not None:
            raise
        print("callboard: standard output: no space is left for it", file=sys.stderr)
        _drop_output()


def _drop_output() -> NoReturn:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(1)


def _parsed(arguments: Sequence[str]) -> argparse.Namespace:
    """Returns what the arguments say; exits for those that are none of the command's, with what replaces them here."""
    parser = _parser()
    parsed, unknown = parser.parse_known_args(arguments)
    if unknown:
        known = answers(arguments)
        typed = [one.partition("=")[0] for one in unknown]
        for flag in (flag for flag in known if flag in typed):
            print(f"callboard: {flag}: {known[flag]}", file=sys.stderr)
        # An argument that begins with no dash may be the value of a flag.
        odd = [flag for flag in typed if flag.startswith("-") and flag not in known]
        if odd or not known:
            parser.error(f"unrecognized arguments: {' '.join(odd or unknown)}")
        sys.exit(ConfigError.exit_code)
    return parsed


def _fill_standard_streams() -> None:
    """Open a standard stream that is closed (``2>&-``) on nothing, so that no socket takes its number."""
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(number, True)
    os.close(number)
    sys.stdin, sys.stdout, sys.stderr = sys.stdin or open(0), sys.stdout or open(1, "w"), sys.stderr or open(2, "w")  # noqa: SIM115


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="callboard",
        description="An LLM serving engine with an OpenAI-compatible HTTP API.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"callboard {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    add = partial(add_command, commands)
    command = add("serve", _serve, "serve a model over HTTP", target_argument(), shared_arguments("info"))
    command.add_argument("--host", help="address to listen on (server.host)")
    command.add_argument("--port", type=natural, help="port to listen on (server.port); 0 takes any free one")
    for extension in find_extensions():
        extension.add_serve_arguments(command)
    apply = "change the settings of a server that runs, under its streams; those that can be changed"
    add_arguments(add("apply", _apply, apply, log_arguments("warning")))
    command = add(
        "generate", _generate, "complete a prompt and print the text", shared_arguments("warning"), _sampling()
    )
    command.add_argument("prompt", help="the text to go on from; - reads it from standard input")
    command = add(
        "chat", _chat, "talk to the model in the terminal", target_argument(), shared_arguments("warning"), _sampling()
    )
    command.add_argument("--system", help="instructions that open the conversation")
    command = add(
        "config", _config, "print the effective configuration as TOML", target_argument(), shared_arguments("warning")
    )
    command.add_argument("--schema", action="store_true", help="print its JSON Schema instead")
    add("plugins", _plugins, "list the plugins that can be chosen", target_argument(), shared_arguments("warning"))
    add(
        "models",
        _models,
        "say how a checkpoint is served, or list the architectures that can be",
        target_argument(),
        shared_arguments("warning"),
    )
    tune = "measure the attention backends that can run here on the model's heads, for later starts to choose by"
    add("tune", _tune, tune, target_argument(), shared_arguments("warning"))
    for extension in find_extensions():
        extension.add_commands(commands)
    return parser


def _sampling() -> argparse.ArgumentParser:
    parent = argparse.ArgumentParser(add_help=False)
    parent.add_argument("--max-tokens", type=count, default=256, help="most tokens to write (default: 256)")
    parent.add_argument("--temperature", type=real, help="0 takes the likeliest token (default: 0.7)")
    parent.add_argument("--top-p", type=real, help="nucleus sampling (default: off; chat: 0.95)")
    parent.add_argument("--min-p", type=real, help="least share of the likeliest token's (default: off; chat: 0.05)")
    parent.add_argument("--seed", type=natural, help="the same seed gives the same text")
    return parent


def _source(parsed: argparse.Namespace, *overrides: str) -> ConfigSource:
    """Returns the source of the configuration that the command line asks for.  Raises ConfigError."""
    files: list[str] = []
    models: list[str] = []
    for given in (parsed.target, parsed.model):
        if given is not None:
            if Path(given).suffix in OF_CHECKPOINTS and Path(given).is_file():
                raise ConfigError(f"{given}: is one file of a checkpoint; name its directory: {Path(given).parent}")
            (files if _is_configuration(given) else models).append(given)
    for what, found in (("configurations", files), ("models", models)):
        if len(found) > 1:
            raise ConfigError(f"two {what} are given, {found[0]} and {found[1]}; name one of them")
    model = [f"model.path={json.dumps(models[0])}"] if models else []
    return ConfigSource(Path(files[0]) if files else None, (*model, *parsed.set, *overrides))


def _configuration(parsed: argparse.Namespace, *overrides: str) -> Config:
    """Returns the configuration that the command line asks for.  Raises ConfigError."""
    source = _source(parsed, *overrides)
    load = load_served if parsed.run is _serve else load_config
    return load(source.path, source.overrides)


def _is_configuration(given: str) -> bool:
    """Whether it is no model: a .toml file, there or not, or whatever else that can be read and is no .gguf."""
    path = Path(given)
    return path.suffix == ".toml" or (path.exists() and not path.is_dir() and path.suffix != ".gguf")


def _serve(parsed: argparse.Namespace, config: Config) -> None:
    overrides = [f"server.{key}={getattr(parsed, key)}" for key in ("host", "port") if getattr(parsed, key) is not None]
    if overrides:
        config = _configuration(parsed, *overrides)
    asked = [one for extension in find_extensions() if (one := extension.serving(parsed, config)) is not None]
    if asked:
        _check(asked[0].configs, asked[0].engines)
        asked[0].run()
        return
    if isinstance(config, SeveralModels):
        raise ConfigError(f"{parsed.target}: has [[models]], and server/extensions/models is not installed")
    source = _source(parsed, *overrides)
    is_alone = os.environ.get("WORLD_SIZE", "1") == "1"
    uvloop.run(_serve_until_stopped(config, source) if is_alone else _serve_on_machines(config, source))
    sys.stderr.flush()
    # Not a plain return: a load that was interrupted still runs on its thread, and nothing is left to clean up.
    os._exit(0)


def _check(configs: Sequence[Config], engines: str = "") -> None:
    """Raise ConfigError for what an extension cannot be served with.  engines: what there are several of."""
    for extension in find_extensions():
        for config in configs:
            extension.check(config, engines)


async def _serve_on_machines(config: Config, source: ConfigSource) -> None:
    from engine.workers.machines.head import Head
    from engine.workers.machines.launch import read_launch
    from engine.workers.machines.node import MachineNode

    launch = read_launch(os.environ, config)
    if launch.index:
        await MachineNode(launch, config).run()
        return
    async with Head(launch, config) as head:
        await _serve_until_stopped(config, source, head)


async def _serve_until_stopped(config: Config, source: ConfigSource, machines: "Machines | None" = None) -> None:
    from engine.control.system import System
    from engine.workers.frontend import FrontendCommand, RemoteIngress
    from server.run.operations import LocalOperations

    read_keys(config.server)  # a file that cannot be used is said before a model is loaded
    _check([config])
    if config.server.tls_cert:
        Tls(config.server)  # so is this
    # The port first: finding it taken must not cost the time of loading a model.
    with bind(config.server.host, config.server.port) as listener:
        frontend = FrontendCommand(FRONT_MODULE, listener.fileno()) if config.placement.ingress == "process" else None
        system = System(config, progress=sys.stderr.isatty(), machines=machines, frontend=frontend)
        for part in find_extensions():
            part.with_engine(system)
        if machines is not None:
            machines.is_draining = lambda: system.entrance.draining
        card = ModelCard.of(system, config.server, described(system))
        operations = LocalOperations(system, source, card)
        engine = asyncio.create_task(_run_engine(system, url_of(listener, config.server.scheme), config.server))
        ways: dict[str, Any] = {"listener": listener, "engine": engine, "reload": operations.reload}
        try:
            if isinstance(system.entrance, RemoteIngress):
                system.entrance.connect_operations(msgspec.msgpack.encode(card), operations.answer)
                await serve_from_process(config.server, system.entrance, **ways)
            else:
                backend = Backend(system.entrance, system.monitor, card, system.codec, operations)
                await serve(config.server, config.limits, backend, storage=config.storage, **ways)
        finally:
            await system.stop()
            engine.cancel()


async def _run_engine(system: "System", url: str, server: ServerSection) -> None:
    started = time.perf_counter()
    await system.start()
    took_s = time.perf_counter() - started
    # What loading has left lives as long as the process: the collector need not look at it again and again.
    gc.collect()
    gc.freeze()
    token = "" if server.needs_key or server.operator_key else read_token()
    greet(system, url, needs_key=server.needs_key, token=token, took_s=took_s)
    await system.wait()


def _apply(parsed: argparse.Namespace, config: Config) -> None:
    apply(parsed.target, config, url=parsed.url, key=parsed.key, dry_run=parsed.dry_run)


def _generate(parsed: argparse.Namespace, config: Config) -> None:
    prompt = sys.stdin.read() if parsed.prompt == "-" else parsed.prompt
    from engine.llm import LLM

    with LLM(config=config, progress=False) as llm:
        for number, delta in enumerate(llm.stream(prompt, _sampling_params(parsed, GENERATING))):
            print(delta.text if number else prompt + delta.text, end="", flush=True)
        print()


def _chat(parsed: argparse.Namespace, config: Config) -> None:
    from engine.llm import LLM

    console = Console(highlight=False)
    opening = [{"role": "system", "content": parsed.system}] if parsed.system else []
    turns = list(opening)
    with LLM(config=config, progress=False) as llm:
        recommended = llm.sampling_defaults
        params = _sampling_params(parsed, GENERATING | recommended if recommended else CHATTING)
        sampled = f"temperature {params.temperature:g}, top_p {params.top_p:g}, min_p {params.min_p:g}"
        console.print(f"[dim]{sampled} (--temperature, --top-p, --min-p)[/dim]")
        console.print("[dim]/reset starts over, /quit or Ctrl-D leaves, Ctrl-C stops an answer[/dim]")
        while True:
            try:
                text = console.input("[bold]you>[/bold] ").strip()
            except (EOFError, KeyboardInterrupt):
                console.print()
                return
            if text == "/quit":
                return
            if text == "/reset":
                turns = list(opening)
                console.print("[dim]the conversation is empty again[/dim]")
            elif text.startswith("/"):
                console.print("[dim]known commands: /reset, /quit[/dim]")
            elif text:
                turns.append({"role": "user", "content": text})
                answer = _answer(llm, turns, params)
                if answer is None:
                    turns.pop()
                else:
                    turns.append({"role": "assistant", "content": answer})


def _answer(llm: "LLM", turns: list[dict[str, str]], params: SamplingParams) -> str | None:
    """Stream one answer to the terminal; None if it was refused."""
    pieces: list[str] = []
    try:
        for delta in llm.stream(turns, params):
            pieces.append(delta.text)
            print(delta.text, end="", flush=True)
    except KeyboardInterrupt:
        print(" [stopped]", end="")
    except RequestError as error:
        print(f"refused: {error}")
        return None
    print()
    return "".join(pieces)


def _sampling_params(parsed: argparse.Namespace, defaults: Mapping[str, float]) -> SamplingParams:
    given = {name: value for name in CHATTING if (value := getattr(parsed, name)) is not None}
    known: dict[str, Any] = {**defaults, **given}
    return SamplingParams(max_tokens=parsed.max_tokens, seed=parsed.seed, **known)


def _config(parsed: argparse.Namespace, config: Config) -> None:
    print(json.dumps(json_schema(), indent=2) if parsed.schema else render_toml(config), end="\n")


def _plugins(parsed: argparse.Namespace, config: Config) -> None:
    from engine.startup.preview import preview_context, preview_template  # torch knows the device

    context = preview_context(config)
    console = Console(highlight=False, markup=False)
    for row in list_plugins(config, context, preview_template(config)):
        mark = {"": " ", "yes": "*"}.get(row.chosen, "?")
        origin = "" if row.info.built_in else f" ({row.info.distribution} {row.info.version})"
        console.print(f"{mark} {row.info.name}{origin}", style="bold" if row.chosen else "", soft_wrap=True, end="")
        chosen = f" [{row.chosen}]" if row.chosen not in ("", "yes") else ""
        reason = "; ".join(row.hindrances)
        console.print(f"{chosen}  {'cannot run here: ' + reason if reason else row.needs}", style="dim", soft_wrap=True)
    console.print("\n* chosen · ? chosen for what the brackets say")
    model = f"heads of {context.head_size}" if context.head_size else "a model that is not on this machine"
    machine = f"{context.device}, {context.dtype or 'any dtype'}, pages of {context.page_size}, {model}"
    console.print(f"here: {machine}; plugin API {API_VERSION}")


def _tune(parsed: argparse.Namespace, config: Config) -> None:
    from engine.startup.race import race_for

    report = race_for(config).run()
    Console().print(report.table())
    if not report.fastest():
        raise PluginError("no attention backend came through; the table says why")


def _models(parsed: argparse.Namespace, config: Config) -> None:
    if any(one is not None and not _is_configuration(one) for one in (parsed.target, parsed.model)):
        path = config.model.path
        spec = read_model(resolve_checkpoint(path, config.model.revision, DESCRIPTION), config.plugins, config.model)
        print(f"{path}: {spec.architecture} is served {how_served(spec)}")
        return
    table = Table("architecture", "family", "distribution", "is served")
    for row in list_families(config.plugins):
        served = "natively" if row.serves else f"once plugins.models names {row.info.short}"
        table.add_row(row.architecture, row.info.name, f"{row.info.distribution} {row.info.version}", served)
    missing = "" if find_spec("transformers") else ", if it is installed: pip install 'callboard[transformers]'"
    table.add_row("most other decoders", THROUGH, "callboard", f"through transformers{missing}")
    Console().print(table)


if __name__ == "__main__":
    main()
