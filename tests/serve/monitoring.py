"""The queries of the dashboard and the alerts to Prometheus."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import yaml

from tests.serve.services import ROOT

DEPLOY = ROOT / "serve" / "deploy"
DASHBOARD = DEPLOY / "grafana" / "sdxl.json"
ALERTS = DEPLOY / "alerts.yml"
METRIC = re.compile(r"\b(sdxl_[a-z_]+)(?:\{([^}]*)\})?")
LABEL = re.compile(r"(\w+)\s*(?:=~|!~|!=|=)")
GROUPING = re.compile(r"\bby \(([^)]*)\)")


def panels() -> list[dict[str, object]]:
    found: list[dict[str, object]] = json.loads(DASHBOARD.read_text())["panels"]
    return [panel for panel in found if panel["type"] != "row"]


def questions() -> Iterator[tuple[str, str]]:
    """Yield each query's place and its PromQL expression."""
    for panel in panels():
        targets = panel["targets"]
        assert isinstance(targets, list)
        for target in targets:
            yield f"panel {panel['title']!r}", target["expr"].replace("$__rate_interval", "1m")
    for group in yaml.safe_load(ALERTS.read_text())["groups"]:
        for rule in group["rules"]:
            yield f"alert {rule['alert']}", rule["expr"]


def unanswered(page: str) -> list[str]:
    """Return the queried metrics and labels that no line of a scraped page has."""
    labels: dict[str, set[str]] = {}
    for line in page.splitlines():
        match = re.match(r"([a-z_]+)(?:\{(.*)\})? ", line)
        if match:
            found = re.findall(r'(\w+)="', match[2] or "")
            labels.setdefault(match[1], set()).update(found)
    missing = []
    for place, expression in questions():
        grouped = {
            name.strip() for text in GROUPING.findall(expression) for name in text.split(",")
        }
        for name, selector in METRIC.findall(expression):
            if name not in labels:
                missing.append(f"{place}: no metric {name}")
                continue
            wanted = set(LABEL.findall(selector)) | grouped
            missing += [f"{place}: {name} has no {w}" for w in sorted(wanted - labels[name])]
    return missing
