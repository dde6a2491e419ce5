"""Dashboard, alerts and scaling: well-formed, of metrics that the server has. tests/server asks it itself."""

import json
import re
from itertools import combinations
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from tests.docker.manifests import CHART, DOCKER, ROOT, dashboard, expressions, metrics_of, rules, run, tool

HERE = Path(__file__).parent
PANELS: list[dict[str, Any]] = dashboard()["panels"]
# Triton's own, from its metrics page; those of GPUs from its documentation (docs/user_guide/metrics.md).
TRITON = set((HERE / "triton_metrics.txt").read_text().split())
# Prometheus makes it itself, for each server that it asks.
PROMETHEUS = {"up"}

needs_promtool = pytest.mark.skipif(
    tool("promtool") is None, reason="promtool is not installed (Debian and Ubuntu: apt-get install prometheus)"
)


def ours() -> set[str]:
    """The names in the sources of both backends."""
    return {
        name
        for source in (ROOT / "backends").glob("*/*.py")
        for name in re.findall(r'"((?:vllm|llm|sdxl):\w+)"', source.read_text())
    }


def test_every_metric_that_is_asked_for_exists() -> None:
    asked = {name: expression for expression in expressions() for name in metrics_of(expression)}
    assert len(asked) > 20
    known = ours() | TRITON | PROMETHEUS
    assert {name: expression for name, expression in asked.items() if name not in known} == {}


@pytest.mark.parametrize(
    ("expression", "names"),
    [
        ('sum by (model, le) (rate(a:b_bucket{model=~"$model", x="y{}"}[$__rate_interval]))', {"a:b"}),
        ("histogram_quantile(0.99, sum without (pod) (rate(a:b_bucket[5m]))) > 2", {"a:b"}),
        ("up == 0 and on (instance) nv_x_count unless absent(c:d_total)", {"up", "nv_x_count", "c:d_total"}),
        ("sum(a:b_sum) / sum(a:b_count) * 1e3", {"a:b"}),
    ],
)
def test_metrics_are_found_in_an_expression(expression: str, names: set[str]) -> None:
    assert metrics_of(expression) == names


def test_dashboard_fits_its_schema() -> None:
    schema = yaml.safe_load((HERE / "dashboard.schema.yaml").read_text())
    jsonschema.Draft202012Validator(schema).validate(dashboard())


def test_no_two_panels_share_a_number_or_a_place() -> None:
    assert len({panel["id"] for panel in PANELS}) == len(PANELS)
    for one, other in combinations([panel["gridPos"] for panel in PANELS], 2):
        beside = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        above = one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
        assert beside or above, (one, other)
    assert all(panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24 for panel in PANELS)


def test_the_dashboard_shows_what_it_is_for() -> None:
    shown = {name for panel in PANELS for target in panel.get("targets", []) for name in metrics_of(target["expr"])}
    assert {
        "vllm:time_to_first_token_seconds",
        "vllm:inter_token_latency_seconds",
        "vllm:e2e_request_latency_seconds",
        "vllm:num_requests_waiting",
        "vllm:num_requests_running",
        "vllm:kv_cache_usage_perc",
        "sdxl:batch_size",
        "sdxl:images_total",
        "nv_inference_queue_duration_us",
        "nv_gpu_utilization",
    } <= shown


def test_variables_that_panels_use_are_defined() -> None:
    defined = {variable["name"] for variable in dashboard()["templating"]["list"]} | {"__rate_interval"}
    used = {name for pair in re.findall(r"\$\{(\w+)\}|\$(\w+)", json.dumps(PANELS)) for name in pair if name}
    assert used == defined


@needs_promtool
def test_promtool_takes_rules_configuration_and_every_expression(tmp_path: Path) -> None:
    run("promtool", "check", "rules", CHART / "files" / "rules.yml")
    # Dashboard's expressions as rules of their own, with Grafana's variables filled in.
    filled = [
        re.sub(r"\$__\w+", "1m", text).replace("$model", ".*").replace("$instance", ".*") for text in expressions()
    ]
    records = [{"record": f"checked:{number}", "expr": text} for number, text in enumerate(filled)]
    made = tmp_path / "expressions.yml"
    made.write_text(yaml.safe_dump({"groups": [{"name": "expressions", "rules": records}]}))
    run("promtool", "check", "rules", made)
    # The configuration names the place of the rules in the container.
    config = tmp_path / "prometheus.yml"
    there = (DOCKER / "prometheus" / "prometheus.yml").read_text()
    config.write_text(there.replace("/etc/prometheus/rules.yml", str(CHART / "files" / "rules.yml")))
    run("promtool", "check", "config", config)


@needs_promtool
def test_alerts_ring_when_they_should_and_only_then() -> None:
    run("promtool", "test", "rules", HERE / "rules_test.yml")


def test_every_alert_is_tested() -> None:
    cases = yaml.safe_load((HERE / "rules_test.yml").read_text())["tests"]
    rings: dict[str, list[bool]] = {case["alertname"]: [] for test in cases for case in test["alert_rule_test"]}
    for test in cases:
        for case in test["alert_rule_test"]:
            rings[case["alertname"]].append(bool(case.get("exp_alerts")))
    assert rings.keys() == {rule["alert"] for rule in rules()}
    assert all(set(seen) == {True, False} for seen in rings.values()), rings
