"""deploy/monitoring/ asks for metrics and labels that /metrics has, and for pods and ports that deploy/ has."""

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from engine.settings.sections import LimitsSection
from tests.server.http_client import ask
from tests.server.live_server import MODEL, LiveServer

DEPLOY = Path(__file__).parents[2] / "deploy"
ALERTS = DEPLOY / "monitoring" / "alerts.yaml"
SUFFIXES = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}
# Prometheus adds the first two.  The others come with what happens: refusals, and ends of requests.
LABELS = {"instance", "le", "reason", "status", "finished_reason", "state", "actor"}
TEXT = re.compile(r"\"[^\"]*\"")


def board() -> dict[str, Any]:
    return json.loads((DEPLOY / "monitoring" / "grafana.json").read_text())


def expressions() -> Iterator[str]:
    for panel in board()["panels"]:
        yield from (target["expr"] for target in panel.get("targets", []))
    for group in yaml.safe_load(ALERTS.read_text())["groups"]:
        yield from (rule["expr"] for rule in group["rules"])
    for metric in autoscaler()["metrics"]:
        yield metric["pods"]["metric"]["name"]


def autoscaler() -> dict[str, Any]:
    return yaml.safe_load((DEPLOY / "monitoring" / "autoscaling.yaml").read_text())["spec"]


@pytest.fixture(scope="module")
def scraped() -> tuple[set[str], set[str]]:
    """Names of all samples that /metrics can have, and labels of those that it has after some traffic."""
    with LiveServer(limits=LimitsSection(max_requests_per_client=1)) as live:
        live.monitor.run(seconds=0.04, decodes=3, prefill_tokens=100)
        ask(live.port, "POST", "/v1/completions", {"model": MODEL, "prompt": ["p", "q"]})
        families = list(text_string_to_metric_families(ask(live.port, "GET", "/metrics").body.decode()))
    names = {family.name + suffix for family in families for suffix in SUFFIXES.get(family.type, ("",))}
    return names, {label for family in families for sample in family.samples for label in sample.labels}


def test_every_metric_that_is_asked_for_is_one(scraped: tuple[set[str], set[str]]) -> None:
    names, _ = scraped
    asked = {name for one in expressions() for name in re.findall(r"\b(?:callboard|process)_\w+", TEXT.sub("", one))}
    assert len(asked) > 20
    assert asked - names == set()


def test_every_label_that_is_asked_for_is_one(scraped: tuple[set[str], set[str]]) -> None:
    _, labels = scraped
    asked: set[str] = set()
    for one in expressions():
        asked.update(re.findall(r"(\w+)\s*=~?", TEXT.sub("", one.replace("==", ""))))
        for listed in re.findall(r"\b(?:by|on)\s*\(([^)]*)\)", one):
            asked.update(name.strip() for name in listed.split(","))
    assert asked <= LABELS
    assert LABELS - {"instance"} <= labels


def test_every_alert_says_how_urgent_it_is_and_what_to_do() -> None:
    rules = [rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]]
    assert len({rule["alert"] for rule in rules}) == len(rules)
    for rule in rules:
        assert rule["labels"]["severity"] in ("page", "ticket"), rule["alert"]
        assert set(rule["annotations"]) == {"summary", "description"}, rule["alert"]
        for path in re.findall(r"docs/[\w.]+", rule["annotations"]["description"]):
            assert (DEPLOY.parent / path).exists(), path


def test_the_command_in_the_alerts_makes_a_rule_for_the_operator() -> None:
    (command,) = re.findall(r"^#   (\{.*?\}) \| kubectl", ALERTS.read_text(), re.MULTILINE | re.DOTALL)
    made = subprocess.run(
        ["sh", "-c", command.replace("\n#", "\n")], cwd=DEPLOY.parent, capture_output=True, text=True, check=True
    )
    rule = yaml.safe_load(made.stdout)
    assert rule["kind"] == "PrometheusRule"
    assert rule["spec"] == yaml.safe_load(ALERTS.read_text())


def test_every_panel_has_a_title_a_unit_and_a_place_of_its_own() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in board()["panels"]:
        assert panel["title"]
        assert panel["type"] == "row" or (panel["description"] and panel["fieldConfig"]["defaults"]["unit"])
        place = panel["gridPos"]
        columns, rows = range(place["x"], place["x"] + place["w"]), range(place["y"], place["y"] + place["h"])
        cells = {(x, y) for x in columns for y in rows}
        assert not taken & cells, panel["title"]
        assert place["x"] + place["w"] <= 24
        taken |= cells


def test_the_monitor_and_the_autoscaler_find_the_deployment() -> None:
    by_kind = {one["kind"]: one for one in yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text())}
    monitor = yaml.safe_load((DEPLOY / "monitoring" / "servicemonitor.yaml").read_text())["spec"]
    service, deployment = by_kind["Service"], by_kind["Deployment"]
    assert monitor["selector"]["matchLabels"] == service["metadata"]["labels"]
    (endpoint,) = monitor["endpoints"]
    assert endpoint["port"] in [port["name"] for port in service["spec"]["ports"]]
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    secrets = {one["name"]: one["valueFrom"]["secretKeyRef"] for one in container["env"] if "valueFrom" in one}
    key = secrets["CALLBOARD_SERVER__OPERATOR_KEY"]
    assert endpoint["authorization"]["credentials"] == key
    aim = autoscaler()["scaleTargetRef"]
    assert (aim["kind"], aim["name"]) == ("Deployment", deployment["metadata"]["name"])
    assert autoscaler()["minReplicas"] == deployment["spec"]["replicas"]
