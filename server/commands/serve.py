"""``callboard serve``: one engine and its HTTP server until a signal, or what an extension serves in their place.

Owns: the order in which both start and stop.  Does not know: arguments of extensions, how either works.
"""

import argparse
import asyncio
import gc
import os
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import uvloop

from engine.config import Config, ConfigSource
from engine.settings.sections import ServerSection
from server.backend import Backend
from server.commands.configuration import read_configuration, read_source
from server.http.listener import bind, url_of
from server.http.tls import Tls
from server.keys import read_keys
from server.local_token import read_token
from server.model_card import ModelCard
from server.run.extension import described, find_extensions
from server.run.greeting import greet
from server.run.serve import serve, serve_from_process

if TYPE_CHECKING:
    from engine.control.system import System
    from engine.workers.placement import Machines

FRONT_MODULE = "server.run.frontend_process"  # the engine starts it, and knows it by name alone


def run(parsed: argparse.Namespace, config: Config) -> None:
    overrides = [f"server.{key}={getattr(parsed, key)}" for key in ("host", "port") if getattr(parsed, key) is not None]
    if overrides:
        config = read_configuration(parsed, *overrides)
    asked = [one for extension in find_extensions() if (one := extension.serving(parsed, config)) is not None]
    if asked:
        _check(asked[0].configs, asked[0].engines)
        asked[0].run()
        return
    source = read_source(parsed, *overrides)
    gc.disable()  # while modules are imported, which are no garbage and would be looked at again and again
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
        _exempt()
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
        ways: dict[str, Any] = {"machines": machines, "frontend": frontend, "imported": _exempt}
        system = System(config, progress=sys.stderr.isatty(), **ways)
        for part in find_extensions():
            part.with_engine(system)
        if machines is not None:
            machines.is_draining = lambda: system.entrance.draining
        card = ModelCard.of(system, config.server, described(system))
        operations = LocalOperations(system, source, card)
        engine = asyncio.create_task(_run_engine(system, url_of(listener, config.server.scheme), config.server))
        ways = {"listener": listener, "engine": engine, "reload": operations.reload}
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


def _exempt() -> None:
    """Go on with garbage collections, without the objects that there are: they live as long as the process."""
    gc.freeze()
    gc.enable()


async def _run_engine(system: "System", url: str, server: ServerSection) -> None:
    started = time.perf_counter()
    await system.start()
    took_s = time.perf_counter() - started
    gc.collect()
    _exempt()
    token = "" if server.needs_key or server.operator_key else read_token()
    greet(system, url, needs_key=server.needs_key, token=token, took_s=took_s)
    await system.wait()
