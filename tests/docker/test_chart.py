"""The Helm chart and the KServe manifests, rendered without a cluster and held against the schemas of their kinds."""

import re
from pathlib import Path
from typing import Any

import helm_python
import jsonschema
import kubernetes_validate
import pytest
import yaml

from tests.docker.manifests import CHART, DOCKER, VARIANTS, Manifest, documents, of_kind, rendered

CUSTOM = yaml.safe_load(Path(__file__).with_name("custom_resources.yaml").read_text())
# The oldest Kubernetes that Chart.yaml allows, and the newest that the schemas are there for.
KUBERNETES = ["1.29", kubernetes_validate.latest_version()]
KSERVE = documents((DOCKER / "kserve" / "serving.yaml").read_text())


@pytest.fixture(scope="module", params=VARIANTS)
def manifests(request: pytest.FixtureRequest) -> list[Manifest]:
    return rendered(VARIANTS[request.param])


@pytest.fixture(scope="module")
def usual() -> list[Manifest]:
    return rendered({})


def check(manifest: Manifest) -> None:
    """Raises when a field is wrong or unknown, and when there is no schema to say so."""
    if custom := CUSTOM.get(f"{manifest['apiVersion']}/{manifest['kind']}"):
        jsonschema.validate(manifest["spec"], custom)
        return
    for version in KUBERNETES:
        kubernetes_validate.validate(manifest, version, strict=True)


def pod_specs(manifests: list[Manifest]) -> dict[str, Any]:
    return {name: made["spec"]["template"]["spec"] for name, made in of_kind(manifests, "Deployment").items()}


@pytest.mark.parametrize("values", VARIANTS.values(), ids=list(VARIANTS))
def test_helm_lint_finds_nothing(values: dict[str, Any]) -> None:
    report = helm_python.lint(CHART, values, strict=True, kube_version="v1.31.0")
    assert report["errors"] == []
    assert [note for note in report["messages"] if note["error"] != "icon is recommended"] == []


def test_every_manifest_fits_its_schema(manifests: list[Manifest]) -> None:
    assert len(manifests) > 10
    for manifest in manifests:
        check(manifest)


def test_kserve_manifests_fit_their_schemas() -> None:
    assert [manifest["kind"] for manifest in KSERVE] == ["ServingRuntime", "InferenceService", "InferenceService"]
    for manifest in KSERVE:
        check(manifest)


def test_an_unknown_field_or_kind_is_found(usual: list[Manifest]) -> None:
    """Of the check itself: it must not let pass what it doesn't know."""
    deployment = of_kind(usual, "Deployment")["shop-llm"]
    with pytest.raises(kubernetes_validate.ValidationError):
        check({**deployment, "spec": {**deployment["spec"], "replica": 2}})
    monitor = of_kind(usual, "PodMonitor")["shop"]
    with pytest.raises(jsonschema.ValidationError):
        check({**monitor, "spec": {**monitor["spec"], "podMetricsEndpoint": []}})
    with pytest.raises(kubernetes_validate.SchemaNotFoundError):
        check({**monitor, "kind": "PodMonitors"})


def test_pools_scale_apart(usual: list[Manifest]) -> None:
    scalers = of_kind(usual, "HorizontalPodAutoscaler")
    metrics = {name: made["spec"]["metrics"][0]["pods"]["metric"]["name"] for name, made in scalers.items()}
    assert metrics == {"shop-llm": "vllm_num_requests_waiting", "shop-sdxl": "nv_inference_pending_request_count"}
    adapter = yaml.safe_load((DOCKER / "prometheus" / "adapter.yaml").read_text())
    assert set(metrics.values()) == {rule["name"]["as"] for rule in adapter["rules"]["custom"]}
    for name, made in of_kind(usual, "Deployment").items():
        assert ("replicas" in made["spec"]) == name.endswith("-envoy"), "an upgrade must not undo the scaling"


@pytest.mark.parametrize("drain", [{}, {"preStop": 5, "exitTimeout": 600}])
def test_nothing_cuts_a_draining_server_off(drain: dict[str, int]) -> None:
    specs = pod_specs(rendered({"drain": drain}))
    for pool in ("llm", "sdxl"):
        container = specs[f"shop-{pool}"]["containers"][0]
        wait = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
        exit_timeout = next(int(entry["value"]) for entry in container["env"] if entry["name"] == "EXIT_TIMEOUT")
        assert specs[f"shop-{pool}"]["terminationGracePeriodSeconds"] >= wait + exit_timeout + 10
        envoy = specs[f"shop-{pool}-envoy"]
        streams = re.search(r"sleep (\d+)", envoy["containers"][0]["lifecycle"]["preStop"]["exec"]["command"][2])
        assert streams is not None
        assert int(streams[1]) >= exit_timeout
        assert envoy["terminationGracePeriodSeconds"] > int(streams[1])


def test_kserve_drains_in_the_same_order() -> None:
    container = KSERVE[0]["spec"]["containers"][0]
    wait = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
    exit_timeout = next(int(entry["value"]) for entry in container["env"] if entry["name"] == "EXIT_TIMEOUT")
    for service in KSERVE[1:]:
        assert service["spec"]["predictor"]["terminationGracePeriodSeconds"] >= wait + exit_timeout + 10


def test_containers_may_do_nothing_but_serve(manifests: list[Manifest]) -> None:
    for name, spec in pod_specs(manifests).items():
        assert spec["automountServiceAccountToken"] is False, name
        assert spec["securityContext"]["runAsNonRoot"], name
        for container in [*spec["containers"], *spec.get("initContainers", [])]:
            security = container["securityContext"]
            assert security["readOnlyRootFilesystem"], name
            assert security["capabilities"] == {"drop": ["ALL"]}, name
            assert not security["allowPrivilegeEscalation"], name


def test_every_volume_that_is_mounted_is_there_and_the_other_way_round(manifests: list[Manifest]) -> None:
    for name, spec in pod_specs(manifests).items():
        containers = [*spec["containers"], *spec.get("initContainers", [])]
        mounted = {mount["name"] for container in containers for mount in container["volumeMounts"]}
        assert mounted == {volume["name"] for volume in spec["volumes"]}, name


def test_services_policies_and_budgets_find_their_pods(manifests: list[Manifest]) -> None:
    pods = [made["spec"]["template"]["metadata"]["labels"] for made in of_kind(manifests, "Deployment").values()]
    specs = [manifest.get("spec", {}) for manifest in manifests]
    selectors = [
        selector.get("matchLabels", selector)
        for spec in specs
        for selector in (spec.get("selector"), spec.get("podSelector"))
        if selector
    ]
    assert len(selectors) > 6
    for selector in selectors:
        assert any(selector.items() <= labels.items() for labels in pods), selector


def test_the_rules_are_the_file_that_prometheus_reads(usual: list[Manifest]) -> None:
    spec = of_kind(usual, "PrometheusRule")["shop"]["spec"]
    assert spec == yaml.safe_load((CHART / "files" / "rules.yml").read_text())
    monitor = of_kind(usual, "PodMonitor")["shop"]["spec"]
    labels = of_kind(usual, "Deployment")["shop-llm"]["spec"]["template"]["metadata"]["labels"]
    assert f'job="{labels[monitor["jobLabel"]]}"' in str(spec), "the job that TritonDown looks for"


@pytest.mark.parametrize("key", ["autoscaling", "balancer", "modelStore"])
def test_a_kind_that_does_not_exist_is_refused_by_name(key: str) -> None:
    with pytest.raises(helm_python.HelmRenderError, match=rf"{key}\.kind is other; allowed: "):
        rendered({key: {"kind": "other"}})
