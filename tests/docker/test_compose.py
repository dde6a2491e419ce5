"""compose.yaml as Docker Compose reads it."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.docker.manifests import DOCKER, ROOT, run

PROFILES = ["--profile", "cpu", "--profile", "gpu", "--profile", "load"]


@pytest.fixture(scope="module")
def services() -> dict[str, Any]:
    text = run("docker-compose", "-f", DOCKER / "compose.yaml", *PROFILES, "config", "--format", "json")
    found: dict[str, Any] = json.loads(text)["services"]
    return found


def test_all_parts_are_there(services: dict[str, Any]) -> None:
    both = {"prometheus", "grafana"}
    assert {name for name, service in services.items() if not service.get("profiles")} == both
    assert services.keys() - both == {"triton-cpu", "triton-gpu", "locust-master", "locust-worker"}


def test_only_this_machine_reaches_them(services: dict[str, Any]) -> None:
    ports = [port for service in services.values() for port in service.get("ports", [])]
    assert len(ports) == 9
    assert {port.get("host_ip") for port in ports} == {"127.0.0.1"}


def test_each_is_limited_and_can_change_nothing_of_its_image(services: dict[str, Any]) -> None:
    for name, service in services.items():
        assert service["read_only"], name
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert int(service["deploy"]["resources"]["limits"]["memory"]) > 0, name


def test_triton_has_shared_memory_a_cache_that_may_be_executed_and_time_to_finish(services: dict[str, Any]) -> None:
    for name in ("triton-cpu", "triton-gpu"):
        triton = services[name]
        assert int(triton["shm_size"]) >= 1 << 30
        assert any(entry.startswith("/cache:exec,uid=1000") for entry in triton["tmpfs"])
        assert triton["stop_grace_period"] == "1m15s"
        assert int(triton["environment"]["EXIT_TIMEOUT"]) < 75
        assert triton["build"]["args"]["DEVICE"] == {"triton-cpu": "cpu", "triton-gpu": "cuda"}[name]
    (device,) = services["triton-gpu"]["deploy"]["resources"]["reservations"]["devices"]
    assert device["capabilities"] == ["gpu"]
    assert "reservations" not in services["triton-cpu"]["deploy"]["resources"]


def test_every_file_that_is_mounted_exists(services: dict[str, Any]) -> None:
    mounts = [mount for service in services.values() for mount in service.get("volumes", []) if mount["type"] == "bind"]
    assert len(mounts) == 4
    for mount in mounts:
        assert Path(mount["source"]).exists(), mount["source"]
        assert mount["read_only"]


def test_locusts_users_exist(services: dict[str, Any]) -> None:
    # Not imported: Locust changes the process that imports it.
    users = (ROOT / "load" / "users.py").read_text()
    for name in ("locust-master", "locust-worker"):
        assert f"class {services[name]['command'][0]}(" in users


def test_grafana_finds_prometheus_and_the_dashboard(services: dict[str, Any]) -> None:
    source = yaml.safe_load((DOCKER / "grafana" / "datasources" / "prometheus.yml").read_text())["datasources"][0]
    assert source["url"] == "http://prometheus:9090"
    provider = yaml.safe_load((DOCKER / "grafana" / "dashboards" / "batching.yml").read_text())["providers"][0]
    targets = [mount["target"] for mount in services["grafana"]["volumes"]]
    assert f"{provider['options']['path']}/dashboard.json" in targets
    scrape = yaml.safe_load((DOCKER / "prometheus" / "prometheus.yml").read_text())
    assert scrape["scrape_configs"][0]["static_configs"][0]["targets"] == ["triton:8002"]
    assert set(scrape["rule_files"]) <= {mount["target"] for mount in services["prometheus"]["volumes"]}
