"""The examples under deploy/ fit the configuration, the routes, and each other."""

import platform
import re
import shutil
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import yaml

from engine.config import Config, load_config
from engine.types.errors import ConfigError, GraphError, WeightsError
from engine.workers.machines.launch import read_launch
from server.access import paths_for
from server.http.listener import ListenError
from tests.server.http_client import ask
from tests.server.live_server import LiveServer

DEPLOY = Path(__file__).parents[2] / "deploy"
TOML = sorted(DEPLOY.glob("*.toml"))
KEY = {"CALLBOARD_SERVER__API_KEY": "the key of clients"}
BOTH = {**KEY, "CALLBOARD_SERVER__OPERATOR_KEY": "the key of operators"}


@pytest.fixture(scope="module")
def manifest() -> dict[str, dict[str, Any]]:
    documents = yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text())
    return {document["kind"]: document for document in documents}


@pytest.mark.parametrize("path", TOML, ids=lambda path: path.stem)
def test_every_configuration_is_one(path: Path) -> None:
    config = load_config(path, [], KEY)
    assert config != Config()
    if config.server.host != "127.0.0.1":
        with pytest.raises(ConfigError, match="api_key"):
            load_config(path, [], {})


def test_there_is_one_for_a_cpu_one_for_a_gpu_one_for_four_and_one_for_two_machines() -> None:
    assert [path.stem for path in TOML] == ["cpu", "gpu", "tp4", "two_machines"]
    assert load_config(DEPLOY / "tp4.toml", [], KEY).device.tensor_parallel == 4


def test_kubernetes_asks_the_routes_that_are_open_and_lets_the_server_drain(
    manifest: dict[str, dict[str, Any]], tmp_path: Path
) -> None:
    file = tmp_path / "callboard.toml"
    file.write_text(manifest["ConfigMap"]["data"]["callboard.toml"])
    config = load_config(file, [], KEY)
    pod = manifest["Deployment"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    probes = {name: container[name]["httpGet"]["path"] for name in container if name.endswith("Probe")}
    assert probes == {"startupProbe": "/ready", "readinessProbe": "/ready", "livenessProbe": "/health"}
    with LiveServer(server=config.server) as live:
        assert all(ask(live.port, "GET", path).status == 200 for path in probes.values())
    waits = int(container["lifecycle"]["preStop"]["exec"]["command"][-1])
    assert pod["terminationGracePeriodSeconds"] > waits + config.server.drain_timeout_s + config.server.client_timeout_s
    assert {one["name"] for one in container["env"] if "valueFrom" in one} == set(BOTH)
    assert container["securityContext"]["allowPrivilegeEscalation"] is False
    assert pod["securityContext"]["runAsNonRoot"] is True
    labels = manifest["Deployment"]["spec"]["template"]["metadata"]["labels"]
    for kind in ("Deployment", "PodDisruptionBudget"):
        assert manifest[kind]["spec"]["selector"]["matchLabels"] == labels
    assert manifest["Service"]["spec"]["selector"] == labels


def test_two_machines_have_a_configuration_that_goes_with_how_they_are_started(tmp_path: Path) -> None:
    keys = {**BOTH, "CALLBOARD_PLACEMENT__CLUSTER_KEY": 32 * "k"}
    documents = list(yaml.safe_load_all((DEPLOY / "kubernetes_two_machines.yaml").read_text()))
    by_name = {(one["kind"], one["metadata"]["name"]): one for one in documents}
    stateful = by_name["StatefulSet", "callboard-ranks"]["spec"]
    file = tmp_path / "callboard.toml"
    file.write_text(by_name["ConfigMap", "callboard-ranks"]["data"]["callboard.toml"])
    pod = stateful["template"]["spec"]
    (container,) = pod["containers"]
    in_pods, by_hand = load_config(file, [], keys), load_config(DEPLOY / "two_machines.toml", [], keys)
    for config, command in ((in_pods, container["args"][0]), (by_hand, (DEPLOY / "two_machines.toml").read_text())):
        told = dict(re.findall(r"--(nnodes|nproc-per-node|master-addr|master-port) ([\w.-]+)", command))
        told_size = int(told["nnodes"]) * int(told["nproc-per-node"])
        environment = {"WORLD_SIZE": str(told_size), "RANK": "0", "MASTER_PORT": told["master-port"]}
        launch = read_launch({**environment, "MASTER_ADDR": told["master-addr"]}, config)
        assert (launch.host, launch.ranks) == (told["master-addr"], 8), "torchrun starts one process per machine"
        assert "--max-restarts" in command
    assert stateful["replicas"] == 2
    assert pod["terminationGracePeriodSeconds"] > in_pods.server.drain_timeout_s + in_pods.server.client_timeout_s
    patience = {one["name"]: one.get("value") for one in container["env"]}.pop("TORCH_ELASTIC_SHUTDOWN_TIMEOUT")
    drained_s = in_pods.server.drain_timeout_s + in_pods.server.client_timeout_s
    assert drained_s < int(patience) < pod["terminationGracePeriodSeconds"]
    assert {one["name"] for one in container["env"] if "value" not in one} == set(keys)
    service = by_name["Service", stateful["serviceName"]]["spec"]
    assert service["publishNotReadyAddresses"]
    assert f"{stateful['serviceName']}-0.{stateful['serviceName']}" in container["args"][0]
    policy = by_name["NetworkPolicy", "callboard-ranks"]["spec"]
    labels = stateful["template"]["metadata"]["labels"]
    assert policy["podSelector"]["matchLabels"] == service["selector"] == labels
    among_themselves, others = policy["ingress"]
    assert among_themselves == {"from": [{"podSelector": {"matchLabels": labels}}]}
    assert others == {"ports": [{"port": container["ports"][0]["containerPort"]}]}


def test_whatever_is_deployed_has_a_secret_for_clients_and_another_for_operators() -> None:
    for name in ("compose.yaml", "kubernetes.yaml", "kubernetes_two_machines.yaml", "callboard.service", "Dockerfile"):
        text = (DEPLOY / name).read_text()
        assert all(one in text for one in BOTH), name
    monitor = yaml.safe_load((DEPLOY / "monitoring" / "servicemonitor.yaml").read_text())
    (endpoint,) = monitor["spec"]["endpoints"]
    assert endpoint["authorization"]["credentials"]["key"] == "operator-key", "/metrics is an operator's"


def test_systemd_waits_for_the_drain_and_does_not_repeat_what_cannot_mend() -> None:
    settings = dict(re.findall(r"^(\w+)=(.*)$", (DEPLOY / "callboard.service").read_text(), re.MULTILINE))
    server = Config().server
    assert int(settings["TimeoutStopSec"]) > server.drain_timeout_s + server.client_timeout_s
    assert settings["KillSignal"] == "SIGTERM"
    codes = {int(code) for code in settings["RestartPreventExitStatus"].split()}
    assert codes == {kind.exit_code for kind in (ConfigError, WeightsError, GraphError, ListenError)}
    assert int(settings["LimitNOFILE"]) > server.max_connections


UNDER_A_FILTER = """
import ctypes, errno, socket, struct, sys
LOAD, EQUAL, RETURN, ALLOW, FAIL = 0x20, 0x15, 0x06, 0x7FFF0000, 0x00050000
families = [getattr(socket, name) for name in sys.argv[2:]]
rules = [(LOAD, 0, 0, 0), (EQUAL, 0, len(families) + 2, int(sys.argv[1])), (LOAD, 0, 0, 16)]  # of the call, the family
rules += [(EQUAL, len(families) - number, 0, family) for number, family in enumerate(families)]
rules += [(RETURN, 0, 0, FAIL | errno.EAFNOSUPPORT), (RETURN, 0, 0, ALLOW)]
code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *rule) for rule in rules))
program = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(rules), ctypes.addressof(code)))
libc = ctypes.CDLL(None, use_errno=True)
if libc.prctl(38, 1, 0, 0, 0) or libc.prctl(22, 2, program, 0, 0):
    sys.exit(77)
assert libc.getifaddrs(ctypes.byref(ctypes.c_void_p())) == 0, errno.errorcode[ctypes.get_errno()]
socket.socketpair()
socket.create_server(("127.0.0.1", 0))
"""
SOCKET_CALL = {"x86_64": "41", "aarch64": "198"}


@pytest.mark.skipif(platform.machine() not in SOCKET_CALL, reason="the number of socket() is not known here")
def test_ranks_find_each_other_under_systemds_restrictions() -> None:
    settings = dict(re.findall(r"^(\w+)=(.*)$", (DEPLOY / "callboard.service").read_text(), re.MULTILINE))
    call, families = SOCKET_CALL[platform.machine()], settings["RestrictAddressFamilies"].split()
    command = [sys.executable, "-c", UNDER_A_FILTER, call]
    ran = subprocess.run([*command, *families], capture_output=True, text=True)
    if ran.returncode == 77:
        pytest.skip("system calls cannot be filtered here")
    assert (ran.returncode, ran.stderr) == (0, "")
    without = subprocess.run([*command, *set(families) - {"AF_NETLINK"}], capture_output=True, text=True)
    assert "EAFNOSUPPORT" in without.stderr, "the filter filters"


def test_what_compiles_kernels_has_a_home_that_can_be_written() -> None:
    unit = (DEPLOY / "callboard.service").read_text()
    assert "ProtectSystem=strict" in unit
    (state,) = re.findall(r"^StateDirectory=(.*)$", unit, re.MULTILINE)
    (cache,) = re.findall(r"^CacheDirectory=(.*)$", unit, re.MULTILINE)
    places = dict(re.findall(r"(HF_HOME|HOME|XDG_CACHE_HOME|TRITON_CACHE_DIR)=(\S+)", unit))
    assert places.pop("HF_HOME").startswith(f"/var/lib/{state}")
    assert len(places) == 3
    assert all(place.startswith(f"/var/cache/{cache}") for place in places.values())
    for name in ("kubernetes.yaml", "kubernetes_two_machines.yaml"):
        documents = yaml.safe_load_all((DEPLOY / name).read_text())
        (pod,) = [one["spec"]["template"]["spec"] for one in documents if one["kind"] in ("Deployment", "StatefulSet")]
        (container,) = pod["containers"]
        assert container["securityContext"]["readOnlyRootFilesystem"]
        home = {one["name"]: one.get("value") for one in container["env"]}["HOME"]
        assert home in [one["mountPath"] for one in container["volumeMounts"] if not one.get("readOnly")]


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
def test_systemd_understands_the_unit(tmp_path: Path) -> None:
    unit = tmp_path / "callboard.service"
    # It wants the program to be there as well.
    unit.write_text(re.sub(r"/opt/callboard/bin/callboard.*", "/bin/true", (DEPLOY / "callboard.service").read_text()))
    checked = subprocess.run(["systemd-analyze", "verify", "--man=no", str(unit)], capture_output=True, text=True)
    if "callboard.service" not in checked.stderr and checked.returncode:
        pytest.skip(f"systemd-analyze cannot run here: {checked.stderr[:200]}")
    assert (checked.returncode, checked.stderr) == (0, "")


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
def test_systemd_finds_little_that_the_unit_could_do_to_others() -> None:
    command = ["systemd-analyze", "security", "--no-pager", "--offline=yes", "--threshold=30"]  # 3.0 of 10
    checked = subprocess.run([*command, str(DEPLOY / "callboard.service")], capture_output=True, text=True)
    if "Overall exposure" not in checked.stdout:
        pytest.skip(f"systemd-analyze cannot look at files here: {checked.stderr[:200]}")
    assert checked.returncode == 0, checked.stdout[-300:]


@pytest.mark.parametrize("name", ["Dockerfile", "Dockerfile.gpu"])
def test_the_images_run_as_nobody_in_particular_with_what_the_repository_has(name: str) -> None:
    lines = (DEPLOY / name).read_text().splitlines()
    ignored = (DEPLOY.parent / ".dockerignore").read_text().splitlines()
    assert "USER callboard" in lines
    for line in lines:
        if line.startswith("COPY "):
            *sources, _ = line.split()[1:]
            assert all((DEPLOY.parent / source).exists() for source in sources), line
            seen = [line[1:] for line in ignored if line.startswith("!")]
            assert all(any(fnmatch(source, one) for one in seen) for source in sources), "the build gets to see it"
    assert "STOPSIGNAL SIGTERM" in lines
    assert {"ENV HOME=/home/callboard", "VOLUME /home/callboard"} <= set(lines), "kernels and models have a place"


def test_the_image_for_gpus_has_what_their_kernels_need() -> None:
    text = (DEPLOY / "Dockerfile.gpu").read_text()
    assert re.search(r"apt-get install .*\bgcc\b", text), "Triton compiles a launcher for each kernel"
    for package in ("flashinfer-python", "flashinfer-cubin", "flashinfer-jit-cache"):
        assert f'"{package}==$FLASHINFER"' in text
    checked = re.findall(r"flashinfer-python==(\S+)", (DEPLOY.parent / "Makefile").read_text())
    assert checked == re.findall(r"^ARG FLASHINFER=(.*)$", text, re.MULTILINE), "the version whose calls are checked"


@pytest.mark.parametrize("name", ["Dockerfile", "Dockerfile.gpu"])
def test_the_images_install_by_hashes_and_fetch_nothing_else_than_builds_with_an_index_of_their_own(name: str) -> None:
    text = (DEPLOY / name).read_text().replace("\\\n", " ")
    by_hashes, *others, ours = re.findall(r"pip install (.*?)(?: && |$)", text, re.MULTILINE)
    assert "--require-hashes --only-binary :all: --requirement requirements.txt --requirement traces.txt" in by_hashes
    assert "--no-deps --no-build-isolation ." in ours
    assert all(re.search(r'"(torch|flashinfer-[a-z-]+)==', one) for one in others), others


def test_compose_starts_what_is_there_and_caddy_finds_it() -> None:
    services = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    ours, proxy = services["callboard"], services["caddy"]
    assert (DEPLOY / ours["build"]["context"] / ours["build"]["dockerfile"]).exists()
    for service in (ours, proxy):
        for volume in service["volumes"]:
            source = volume.split(":")[0]
            assert not source.startswith(".") or (DEPLOY / source).is_file(), source
    server = load_config(DEPLOY / "cpu.toml", [], {name: BOTH[name] for name in ours["environment"]}).server
    assert all((server.api_key, server.operator_key))
    assert int(ours["stop_grace_period"].removesuffix("s")) > server.drain_timeout_s + server.client_timeout_s
    assert "ports" not in ours, "only the proxy is reached from outside"
    caddy = (DEPLOY / "Caddyfile").read_text()
    assert re.findall(r"reverse_proxy (\S+)", caddy) == [f"callboard:{server.port}"]
    paths, hidden = (line.split() for line in re.findall(r"^\t\t(?:not )?path (.*)$", caddy, re.MULTILINE))

    def passed(path: str) -> bool:
        return any(fnmatch(path, pattern) for pattern in paths) and not any(fnmatch(path, one) for one in hidden)

    with LiveServer() as live:
        for path in ("/health", "/v1/models"):
            assert passed(path)
            assert ask(live.port, "GET", path).status == 200
    assert passed("/v1/streams/one")
    assert not any(map(passed, paths_for(live.runner.app, "operator")))
