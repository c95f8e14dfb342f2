"""Replicas as Ray actors: Ray places them on its machines, and starts one again that has died.

Owns: what runs in such an actor, how routers find those of a fleet.  Does not know: requests, where they are sent.
"""

import asyncio
import hashlib
import logging
import os
import threading
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import msgspec
import uvloop

from engine.config import Config, build_config
from engine.settings.sections import ServerSection
from engine.types.errors import ConfigError
from engine.workers.machines.settings import MachinesSettings
from server.backend import Backend
from server.extensions.replicas.held import HELD, HeldPrompts, reporting
from server.extensions.replicas.router import route
from server.extensions.replicas.secret import FleetSecret, require_secret, with_hashed_keys
from server.http.listener import bind, url_of
from server.keys import read_keys
from server.model_card import ModelCard
from server.run.extension import described

log = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
CRASHED_EXIT_CODE = 1
NAMESPACE = "callboard"  # of the actors of fleets with a name
STOP_TIMEOUT_S = 30.0
LOOK_EVERY_S = 0.1


def serve_on_ray(
    config: Config, size: int, name: str | None = None, *, shares_port: bool = False, own_port: int | None = None
) -> None:
    """Serve until stopped, as the router of so many replicas.  name: of those that it shares.  Raises ConfigError.

    shares_port: with other routers.  own_port: where this router alone answers too."""
    read_keys(config.server)
    if config.placement.ingress == "process":
        raise ConfigError("placement.ingress = 'process': a replica has its HTTP with it; use 'inline' here")
    with ExitStack() as stack:
        listener = stack.enter_context(bind(config.server.host, config.server.port, is_shared=shares_port))
        own = () if own_port is None else (stack.enter_context(bind(config.server.host, own_port)),)
        fleet = RayFleet(config, size) if name is None else SharedFleet(config, size, name)
        where = url_of(listener, config.server.scheme)
        alone = "".join(f", alone at {url_of(one, config.server.scheme)}" for one in own)
        print(f"router of {size} replicas at {where}{alone}; GET /replicas says how they are", flush=True)
        uvloop.run(route(config, fleet, listener, more=own))


def host_of_replica(server: ServerSection, host: str) -> str:
    """Returns where a replica listens.  Raises ConfigError for an address beyond loopback where clients need no key.

    It is asked where the replica is: nodes join, and Ray moves actors, after the router has started."""
    if host != LOOPBACK and not server.needs_key:
        raise ConfigError(f"a replica at {host} listens on its network: set server.api_key or server.key_file")
    return host


def config_of_replicas(config: Config) -> bytes:
    """Returns the configuration as Ray gets to keep it: with digests for keys, and without what replicas need not."""
    server = with_hashed_keys(config.server).without_tls
    placement = msgspec.structs.replace(config.placement, cluster_key="")
    return msgspec.json.encode(msgspec.structs.replace(config, server=server, placement=placement))


def terms_of(config: Config, size: int, digest: str) -> str:
    """Returns a digest of what the routers of a fleet must agree on.  Where they listen is not part of it."""
    server = msgspec.structs.replace(config.server, host="", port=0)
    agreed = config_of_replicas(msgspec.structs.replace(config, server=server))
    return hashlib.sha256(b"%b %d %b" % (agreed, size, digest.encode())).hexdigest()


class EngineReplica:
    """One engine and its HTTP server.  Ray makes an actor of it; when the engine ends, so does the actor's process.

    config: as JSON, without secrets.  on_node: Ray's id of the router's node; there loopback is enough.
    digest: of the fleet's secret.  terms: what its routers must agree on."""

    def __init__(self, config: bytes, on_node: str, digest: str, terms: str) -> None:
        self._digest = digest
        self._terms = terms
        self._config = build_config(Config(), msgspec.json.decode(config))
        self._on_node = on_node
        self._url: str | None = None
        self._listening = threading.Event()
        threading.Thread(target=self._run, name="engine", daemon=True).start()

    def url(self) -> str:
        """Returns where it listens; waits until it does."""
        self._listening.wait()
        assert self._url is not None
        return self._url

    def terms(self) -> str:
        """Returns what its routers must agree on."""
        return self._terms

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException:
            log.exception("the replica's engine has ended")
        os._exit(CRASHED_EXIT_CODE)  # the only way in which Ray notices, and starts another

    async def _serve(self) -> None:
        import ray

        from engine.control.system import System
        from server.run.app import create_runner

        here = ray.get_runtime_context().get_node_id() == self._on_node
        config = self._config
        host = host_of_replica(config.server, LOOPBACK if here else ray.util.get_node_ip_address())
        system = System(config)
        held = system.watchers[HELD] = HeldPrompts()
        card = ModelCard.of(system, config.server, described(system))
        backend = Backend(system.ingress, system.monitor, card, system.codec)
        guard = reporting(held, require_secret(self._digest))
        with bind(host, 0) as listener:
            runner = create_runner(config.server, config.limits, backend, guard=guard)
            await runner.listen(listener)
            self._url = url_of(listener)
            self._listening.set()
            await system.start()
            await system.wait()


class RayFleet:
    """A fleet of Ray actors, which end with it.  Joins the cluster at RAY_ADDRESS, or starts Ray on this machine.

    Raises ConfigError if Ray is not installed, or if replicas on other machines would take requests without a key."""

    def __init__(self, config: Config, size: int) -> None:
        try:
            import ray
        except ImportError:
            raise ConfigError("--on ray needs Ray: pip install 'callboard[ray]'") from None
        self.size = size
        self._ray: Any = ray
        self._join()
        if len(ray.nodes()) > 1 and not config.server.needs_key:
            ray.shutdown()
            raise ConfigError(
                "replicas on other machines listen on their network: set server.api_key or server.key_file"
            )
        options = {"num_cpus": 0, "num_gpus": 1} if ray.cluster_resources().get("GPU") else {"num_cpus": 0}
        self._replica: Any = ray.remote(max_restarts=-1, max_task_retries=-1, **options)(EngineReplica)
        # What a client may use in a minute is counted once, by the router.
        limits = msgspec.structs.replace(config.limits, requests_per_minute=0, tokens_per_minute=0)
        secret = self._secret()
        self.headers: Mapping[str, str] = secret.headers
        config = msgspec.structs.replace(config, limits=limits)
        self._terms = terms_of(config, size, secret.digest)
        self._arguments = config_of_replicas(config), self._loopback_node(config.server), secret.digest, self._terms
        self._actors = [self._new_actor(number) for number in range(size)]
        log.info("ray: %d replicas on %d nodes", size, len(ray.nodes()))

    async def url(self, number: int) -> str:
        where: str = await self._actors[number].url.remote()
        return where

    async def stop(self, number: int) -> None:
        """End a replica; Ray does not start it again."""
        self._ray.kill(self._actors[number], no_restart=True)

    async def start(self, number: int) -> None:
        """Start a replica that was stopped, somewhere in the cluster."""
        self._actors[number] = self._new_actor(number)

    def close(self) -> None:
        """End them all, and leave the cluster."""
        self._ray.shutdown()

    def _join(self) -> None:
        self._ray.init(include_dashboard=False, log_to_driver=True, configure_logging=False)

    def _secret(self) -> FleetSecret:
        return FleetSecret()

    def _loopback_node(self, server: ServerSection) -> str:
        """Returns the id of the node on which replicas may listen on loopback."""
        node: str = self._ray.get_runtime_context().get_node_id()
        return node

    def _new_actor(self, number: int) -> Any:
        return self._replica.remote(*self._arguments)


class SharedFleet(RayFleet):
    """A fleet with a name, of any number of routers: it outlives them, and each finds the same replicas.

    Raises ConfigError as well where no cluster runs, without a key, and if the fleet runs with other settings."""

    def __init__(self, config: Config, size: int, name: str) -> None:
        self._name = name
        self._key = MachinesSettings.read(config.placement).cluster_key
        if not self._key:
            raise ConfigError("--fleet needs placement.cluster_key: routers of one fleet have the same secret by it")
        super().__init__(config, size)
        terms = self._ray.get([actor.terms.remote() for actor in self._actors])
        if any(one != self._terms for one in terms):
            for actor, one in zip(self._actors, terms, strict=True):
                if (
                    one == self._terms
                ):  # this router has started it, and would leave it to a fleet that does not want it
                    self._ray.kill(actor, no_restart=True)
            raise ConfigError(
                f"the fleet {name!r} runs with other settings, another number of replicas or another "
                "placement.cluster_key: start this router with those, or choose another name"
            )

    async def url(self, number: int) -> str:
        """Returns where the replica listens; another router may have started it.  Raises ValueError if none runs."""
        self._actors[number] = await asyncio.to_thread(self._found, number)
        return await super().url(number)

    async def is_running(self, number: int) -> bool:
        try:
            await asyncio.to_thread(self._found, number)
        except ValueError:
            return False
        return True

    async def stop(self, number: int) -> None:
        """End a replica, and wait until its name is free."""
        await super().stop(number)
        for _ in range(round(STOP_TIMEOUT_S / LOOK_EVERY_S)):
            if not await self.is_running(number):
                break
            await asyncio.sleep(LOOK_EVERY_S)

    def _join(self) -> None:
        try:
            self._ray.init(address="auto", log_to_driver=False, configure_logging=False)
        except ConnectionError:
            raise ConfigError(
                "--fleet joins a Ray cluster that runs already, so that no router holds it: `ray start --head`"
            ) from None

    def _secret(self) -> FleetSecret:
        return FleetSecret(self._key, self._name)

    def _loopback_node(self, server: ServerSection) -> str:
        return "" if server.needs_key else super()._loopback_node(server)  # routers may be on other machines

    def _new_actor(self, number: int) -> Any:
        options = {"name": self._name_of(number), "namespace": NAMESPACE, "lifetime": "detached", "get_if_exists": True}
        return self._replica.options(**options).remote(*self._arguments)

    def _found(self, number: int) -> Any:
        return self._ray.get_actor(self._name_of(number), namespace=NAMESPACE)

    def _name_of(self, number: int) -> str:
        return f"{self._name}-{number}"
