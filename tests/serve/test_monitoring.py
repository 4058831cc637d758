"""The dashboard, the alerts and Prometheus' own configuration, checked by Prometheus' own tool."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.serve.monitoring import ALERTS, DASHBOARD, DEPLOY, panels, questions, unanswered
from tests.serve.servers import GENERATE, listening
from tests.tools import tool

RULE_TESTS = Path(__file__).with_name("alerts_test.yml")
COLUMNS = 24


def promtool(*arguments: str, folder: Path | None = None) -> None:
    command = [tool("promtool", "prometheus"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr


def test_alerts_fire_when_they_should_and_only_then(tmp_path: Path) -> None:
    for file in (ALERTS, RULE_TESTS):
        shutil.copy(file, tmp_path)
    promtool("test", "rules", RULE_TESTS.name, folder=tmp_path)


def test_every_alert_has_a_test_in_which_it_fires() -> None:
    rules = {
        rule["alert"] for g in yaml.safe_load(ALERTS.read_text())["groups"] for rule in g["rules"]
    }
    tests = yaml.safe_load(RULE_TESTS.read_text())["tests"]
    fire = {t["alertname"] for each in tests for t in each["alert_rule_test"] if "exp_alerts" in t}
    assert fire == rules


def test_prometheus_takes_its_configuration() -> None:
    promtool("check", "config", "--syntax-only", str(DEPLOY / "prometheus.yml"))


def test_every_question_of_the_dashboard_is_promql(tmp_path: Path) -> None:
    rules = [{"record": f"q{i}", "expr": text} for i, (_, text) in enumerate(questions())]
    file = tmp_path / "questions.yml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": rules}]}))
    promtool("check", "rules", str(file))


def test_panels_fill_a_grid_and_do_not_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in panels():
        place: Any = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken and place["x"] + place["w"] <= COLUMNS, panel["title"]
        taken |= cells
    identities = [panel["id"] for panel in panels()]
    assert len(set(identities)) == len(identities)


def test_grafana_finds_the_dashboard_and_its_data() -> None:
    sources = yaml.safe_load((DEPLOY / "grafana" / "datasources.yml").read_text())["datasources"]
    uids = {source["uid"] for source in sources}
    asked = {panel["datasource"]["uid"] for panel in panels()}  # type: ignore[index]
    assert asked <= uids
    providers = yaml.safe_load((DEPLOY / "grafana" / "dashboards.yml").read_text())["providers"]
    mounts = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]["grafana"]["volumes"]
    place = f"{providers[0]['options']['path']}/{DASHBOARD.name}"
    assert any(mount.split(":")[1] == place for mount in mounts), mounts


@pytest.mark.usefixtures("one_gpu")
def test_every_metric_is_there_where_there_is_a_gpu() -> None:
    """Ray adds `replica` and `ingress`, which tests of the whole service check."""
    with listening() as (url, _):
        httpx.post(f"{url}{GENERATE}", json={"prompt": "a ring", "steps": 2}).raise_for_status()
        page = httpx.get(f"{url}/metrics").text
    labels = 'gpu="0",model="sdxl-mini",work="images"'
    assert f"sdxl_gpu_energy_joules_total{{{labels}}} 1.5" in page
    missing = [each for each in unanswered(page) if not each.endswith("has no replica")]
    assert not missing, "\n".join(missing)
