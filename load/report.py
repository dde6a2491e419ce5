"""From a comparison's folder to what people read: table.md, plots, and a report.html that needs no other file."""

import argparse
import base64
import html
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from load import batches, drive, machine, plots, samples, seats
from load.figures import summarise
from load.samples import Kind
from load.server import ROOT
from load.slo import Slo
from load.table import Group, Measured, groups, table

RESULTS = ROOT / "load" / "results"
ABOUT, RUNS, FAILURES = "run.json", "runs", "failures.json"

NOTES = (
    "TTFT (time to first token), ITL (gaps between responses) and E2EL (end-to-end latency) are those of vLLM's "
    "`bench serve`, from each request's intended start: what waits for a free user or in a queue is part of them.",
    "ratio: throughput against the first model of the table under the same traffic. As long as a model keeps up with "
    "an open loop, its throughput is what was asked for; only at loads that it can't hold does it show what it can do.",
    "mean batch: tokens generated per pass over the weights (text), requests per execution (pictures). queue: the mean "
    "time in Triton's queue; requests that wait for a seat inside `llm` are not in it, but in TTFT.",
)
HTML = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>{title}</title>
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem; color: #222 }}
table {{ border-collapse: collapse; margin: 1rem 0; font-variant-numeric: tabular-nums }}
th, td {{ border-bottom: 1px solid #ddd; padding: .3rem .7rem; text-align: right }}
th:first-child, td:first-child {{ text-align: left }}
img {{ max-width: 100%; display: block; margin: 1rem 0 }}
pre {{ background: #f4f4f4; padding: .7rem; overflow-x: auto }}
</style>
<h1>{title}</h1>
{body}</html>
"""


@dataclass(frozen=True)
class Picture:
    caption: str
    file: str


def read(folder: Path) -> list[Measured]:
    """All runs of the folder that are complete."""
    found = []
    for about in sorted((folder / RUNS).glob(f"*/{drive.RUN}")):
        if about.parent.suffix == ".part":
            continue
        run = drive.stored(about)
        found.append(
            Measured(run, samples.read(about.parent / drive.SAMPLES), batches.read(about.parent / drive.METRICS))
        )
    return found


def write(folder: Path, slos: Mapping[Kind, Slo]) -> str:
    """Writes the report anew from whatever runs are there. Returns the Markdown."""
    about = json.loads((folder / ABOUT).read_text())
    failures = json.loads((folder / FAILURES).read_text()) if (folder / FAILURES).exists() else {}
    measured = read(folder)
    models = [model["name"] for model in about["models"]]
    made = groups(measured, models, slos)
    for old in folder.glob("*.png"):
        old.unlink()
    pictures = {group.slug: draw(group, measured, about["models"], folder) for group in made}
    markdown = _markdown(folder.name, made, pictures, about, failures, slos)
    (folder / "table.md").write_text(markdown)
    (folder / "report.html").write_text(_html(folder, made, pictures, about, failures, slos))
    return markdown


def draw(group: Group, measured: Sequence[Measured], models: list[dict[str, Any]], folder: Path) -> list[Picture]:
    made = [
        Picture("Throughput against latency", f"throughput_{group.slug}.png"),
        Picture("Latency by load", f"latency_{group.slug}.png"),
    ]
    plots.throughput_against_latency(group, folder / made[0].file)
    plots.percentiles_by_load(group, folder / made[1].file)
    busiest = busiest_runs(group, measured)
    load = busiest[0].run.traffic.label
    if group.kind == "llm":
        made.append(Picture(f"Who sat where: {load}", f"bus_{group.slug}.png"))
        seated = {model["name"]: model["seats"] for model in models}
        plots.bus([panel(one, seated[one.run.model]) for one in busiest], made[-1].caption, folder / made[-1].file)
    else:
        made.append(Picture(f"Mean batch over time: {load}", f"batches_{group.slug}.png"))
        series = [(one.run.model, batches.over_time(one.readings, one.run.kind)) for one in busiest]
        plots.batches_over_time(series, made[-1].caption, folder / made[-1].file)
    return made


def busiest_runs(group: Group, measured: Sequence[Measured]) -> list[Measured]:
    """The first repeat of each model under the highest load that most of the group's models were measured at."""
    by_load: dict[str, list[str]] = {}
    for row in group.rows:
        by_load.setdefault(row.traffic.slug, []).append(row.model)
    most = max(len(models) for models in by_load.values())
    slug = [slug for slug, models in by_load.items() if len(models) == most][-1]
    first: dict[str, Measured] = {}
    for one in sorted(measured, key=lambda one: one.run.repeat):
        if one.run.kind == group.kind and one.run.traffic.slug == slug:
            first.setdefault(one.run.model, one)
    return [first[model] for model in by_load[slug]]


def panel(one: Measured, places: int) -> plots.Panel:
    figures = summarise(one.samples)
    ended = max((sample.ended for sample in one.samples), default=0.0)
    return plots.Panel(one.run.model, seats.rides(one.samples), places, ended, figures.output_tokens_per_second)


def _facts(about: dict[str, Any], slos: Mapping[Kind, Slo]) -> list[str]:
    facts = [f"Machine: {machine.in_words(about['machine'])}."]
    facts.append(f"Versions: {', '.join(f'{name} {version}' for name, version in about['versions'].items())}.")
    facts += [f"Commit: {about['commit']}."] if about["commit"] else []
    facts.append(f"Started: {about['started']}.")
    stated = [f"{slo} ({'texts' if kind == 'llm' else 'pictures'})" for kind, slo in slos.items()]
    facts += [f"SLO: {'; '.join(stated)}. Goodput: requests per second that kept to all of it."] if stated else []
    return facts


def _repeats(made: Sequence[Group]) -> list[str]:
    most = max((row.repeats for group in made for row in group.rows), default=1)
    return [f"Of {most} repeats each figure is the middle one; ratios: (lowest to highest)."] if most > 1 else []


def _troubles(about: dict[str, Any], failures: dict[str, str]) -> list[str]:
    return [*about["left_out"], *(f"{key} failed: {why}" for key, why in sorted(failures.items()))]


def _markdown(
    name: str,
    made: Sequence[Group],
    pictures: dict[str, list[Picture]],
    about: dict[str, Any],
    failures: dict[str, str],
    slos: Mapping[Kind, Slo],
) -> str:
    parts = [f"# {name}\n", "```sh\n" + "\n".join(about["commands"]) + "\n```\n"]
    parts += [f"{fact}\n" for fact in _facts(about, slos)]
    for group in made:
        parts += [f"## {group.title}\n", table(group).markdown()]
        parts += [f"![{picture.caption}]({picture.file})\n" for picture in pictures[group.slug]]
    parts.append("\n".join(f"- {note}" for note in [*NOTES, *_repeats(made)]) + "\n")
    troubles = _troubles(about, failures)
    parts += ["Not measured:\n", "\n".join(f"- {trouble}" for trouble in troubles) + "\n"] if troubles else []
    return "\n".join(parts)


def _html(
    folder: Path,
    made: Sequence[Group],
    pictures: dict[str, list[Picture]],
    about: dict[str, Any],
    failures: dict[str, str],
    slos: Mapping[Kind, Slo],
) -> str:
    parts = [f"<pre>{html.escape(chr(10).join(about['commands']))}</pre>\n"]
    parts += [f"<p>{html.escape(fact)}</p>\n" for fact in _facts(about, slos)]
    for group in made:
        parts += [f"<h2>{html.escape(group.title)}</h2>\n", table(group).html()]
        for picture in pictures[group.slug]:
            data = base64.b64encode((folder / picture.file).read_bytes()).decode()
            parts.append(f'<img alt="{html.escape(picture.caption)}" src="data:image/png;base64,{data}">\n')
    parts.append(_list([*NOTES, *_repeats(made)]))
    troubles = _troubles(about, failures)
    parts += ["<h2>Not measured</h2>\n", _list(troubles)] if troubles else []
    return HTML.format(title=html.escape(folder.name), body="".join(parts))


def _list(items: Sequence[str]) -> str:
    return "<ul>" + "".join(f"<li>{html.escape(item)}</li>" for item in items) + "</ul>\n"


def add_slos(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--slo", type=Slo.parse, help="such as ttft=500ms,itl_p99=100ms,e2e_p99=2s, for goodput")
    parser.add_argument("--sdxl-slo", type=Slo.parse, help="of picture models (default: as --slo)")


def slos_of(args: argparse.Namespace) -> dict[Kind, Slo]:
    stated: dict[Kind, Slo | None] = {"llm": args.slo, "sdxl": args.sdxl_slo or args.slo}
    return {kind: slo for kind, slo in stated.items() if slo}


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="scripts/load report", description="Writes a comparison's report anew.")
    parser.add_argument("name", help="of the folder in load/results/")
    add_slos(parser)
    args = parser.parse_args(argv)
    if not (RESULTS / args.name / ABOUT).exists():
        parser.error(f"name is {args.name!r}; allowed: a folder in {RESULTS} that scripts/load compare has made")
    print(write(RESULTS / args.name, slos_of(args)))
    return 0
