"""What README.md says of names, defaults and metrics is what the code says."""

import dataclasses
import json
import re
import runpy
from typing import Any

from engine.config import EngineConfig

from tests.server.tritonserver import ROOT

README = (ROOT / "README.md").read_text()


def rows(heading: str) -> dict[str, str]:
    """The first two columns of the table whose first column is headed so."""
    table = README.split(f"\n| {heading} |")[1].split("\n\n")[0]
    return dict(re.findall(r"^\| `(\w+)` \| ([^|]*) \|", table, re.MULTILINE))


def defaults(kind: Any) -> dict[str, str]:
    return {
        field.name: "required" if field.default is dataclasses.MISSING else json.dumps(field.default)
        for field in dataclasses.fields(kind)
    }


def test_readme_names_every_key_of_model_json() -> None:
    assert rows("key of model.json") == defaults(EngineConfig)


def test_the_page_of_parameters_is_what_the_code_says() -> None:
    page = runpy.run_path(str(ROOT / "scripts" / "parameters.py"))
    assert page["PAGE"].read_text() == page["page"](), "run scripts/parameters.py"


def test_readme_names_every_input() -> None:
    schema = (ROOT / "backends/llm/schema.py").read_text()
    inputs = re.findall(r'^    \("(\w+)", "TYPE_\w+", \[1\], True\)', schema, re.MULTILINE)
    assert "text_input" in inputs
    assert [name for name in inputs if f"`{name}`" not in README] == []


def test_readme_names_every_metric() -> None:
    source = (ROOT / "backends/llm/metrics.py").read_text()
    named = set(re.findall(r'"(v?llm:\w+)"', source))
    assert named == set(re.findall(r"`(v?llm:\w+)`", README))


def test_links_between_documents_lead_somewhere() -> None:
    for document in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        links = re.findall(r"\]\((?!https?:)([^)#]+)\)", document.read_text())
        assert [link for link in links if not (document.parent / link).exists()] == [], document.name
