"""The files of docker/ as a user gets them: tools of the virtual environment, the chart rendered, its metrics."""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
DOCKER = ROOT / "docker"
CHART = DOCKER / "helm"
Manifest = dict[str, Any]

# Together they take every branch of the chart's templates.
VARIANTS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "keda, gateway, claim": {
        "autoscaling": {"kind": "keda"},
        "balancer": {"kind": "gateway"},
        "modelStore": {"kind": "claim", "claim": "models"},
        "adminKeySecret": "triton",
        "imagePullSecrets": [{"name": "registry"}],
        "monitoring": {"labels": {"release": "prometheus"}},
        "locust": {"enabled": True, "args": ["--users=64"]},
    },
    "nothing beside, init": {
        "autoscaling": {"kind": "none"},
        "balancer": {"kind": "none"},
        "modelStore": {"kind": "init", "init": {"env": [{"name": "SOURCE", "value": "elsewhere"}]}},
        "networkPolicy": {"egress": [{"ports": [{"port": 443}]}]},
        "locust": {"enabled": True, "user": "LlmHttpUser"},
        "pools": {"llm": {"env": [{"name": "HF_HUB_OFFLINE", "value": "1"}], "nodeSelector": {"gpu": "h200"}}},
    },
}

QUOTED = re.compile(r'"(?:[^"\\]|\\.)*"')
GROUPING = re.compile(r"\b(?:by|without|on|ignoring|group_left|group_right)\s*\([^)]*\)")
NAME = re.compile(r"(?<![\w.])[a-zA-Z_:][\w:]*(?!\s*\(|[\w:])")
WORDS = {"and", "or", "unless", "bool", "offset", "inf", "nan", "s", "m", "h"}


def tool(name: str) -> str | None:
    """The executable, of this virtual environment before any other."""
    return shutil.which(name, path=str(Path(sys.executable).parent)) or shutil.which(name)


def run(*command: str | Path, **options: Any) -> str:
    """What the command said; the test fails with it if the command does. pip installs what it needs from dev.lock."""
    program = tool(str(command[0]))
    assert program, f"{command[0]} is not installed; it is in requirements/dev.lock"
    done = subprocess.run([program, *command[1:]], capture_output=True, text=True, timeout=120, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def documents(text: str) -> list[Manifest]:
    return [document for document in yaml.safe_load_all(text) if document]


def rendered(values: dict[str, Any]) -> list[Manifest]:
    """The chart's manifests for a release called `shop`."""
    from helm_python import Chart

    templates = Chart.load(CHART).render(values, name="shop", namespace="inference")
    return [manifest for text in templates.values() for manifest in documents(text)]


def of_kind(manifests: list[Manifest], kind: str) -> dict[str, Manifest]:
    return {manifest["metadata"]["name"]: manifest for manifest in manifests if manifest["kind"] == kind}


def dashboard() -> Manifest:
    made: Manifest = json.loads((CHART / "files" / "dashboard.json").read_text())
    return made


def rules() -> list[Manifest]:
    groups = yaml.safe_load((CHART / "files" / "rules.yml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def _strings(value: Any, key: str) -> Iterator[str]:
    """The strings under the key, at any depth."""
    if isinstance(value, dict):
        for name, inner in value.items():
            if name == key and isinstance(inner, str):
                yield inner
            yield from _strings(inner, key)
    elif isinstance(value, list):
        for inner in value:
            yield from _strings(inner, key)


def expressions() -> list[str]:
    """Every PromQL expression in docker/: panels and variables, alerts, and what scaling goes by."""
    variables = _strings(dashboard()["templating"], "definition")  # label_values(EXPRESSION, label)
    scaling = rendered({"autoscaling": {"kind": "keda"}})
    kserve = documents((DOCKER / "kserve" / "serving.yaml").read_text())
    adapter = yaml.safe_load((DOCKER / "prometheus" / "adapter.yaml").read_text())
    return [
        *_strings(dashboard()["panels"], "expr"),
        *(definition.partition("(")[2].rpartition(",")[0] for definition in variables),
        *(rule["expr"] for rule in rules()),
        *_strings([*scaling, *kserve], "query"),
        *_strings(adapter, "seriesQuery"),
    ]


def metrics_of(expression: str) -> set[str]:
    """The metrics that a PromQL expression reads. Of a histogram its own name, not that of its buckets."""
    bare = re.sub(r"\{[^{}]*\}|\[[^\]]*\]", " ", QUOTED.sub(" ", expression))
    names = set(NAME.findall(GROUPING.sub(" ", bare))) - WORDS
    return {re.sub(r"_(bucket|sum|count)$", "", name) if ":" in name else name for name in names}
