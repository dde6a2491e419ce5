"""From the runs of a comparison to rows, side by side, and from rows to a Markdown table."""

import html
import itertools
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from load import batches
from load.batches import Reading
from load.figures import Figures, summarise
from load.percentiles import Spread
from load.plan import Run, Traffic
from load.samples import Kind, Sample
from load.slo import Slo


@dataclass(frozen=True)
class Measured:
    run: Run
    samples: list[Sample]
    readings: list[Reading]


@dataclass(frozen=True)
class Latency:
    """Seconds; None of a kind that has none."""

    p50: float | None
    p99: float | None


@dataclass(frozen=True)
class Row:
    """One model under one traffic. Of several repeats each figure is the middle one."""

    model: str
    kind: Kind
    traffic: Traffic
    repeats: int
    requests: int
    failed: int  # the two over all repeats
    throughput: float  # output tokens, or images, per second
    ratios: tuple[float, ...]  # to the first model under the same traffic, repeat by repeat; rising
    ttft: Latency
    itl: Latency
    e2el: Latency
    goodput: float | None
    mean_batch: float | None
    queue: float | None  # seconds


@dataclass(frozen=True)
class Group:
    """Rows that stand in one table and one plot."""

    kind: Kind
    loop: str
    output_lengths: str | None
    rows: list[Row]

    @property
    def title(self) -> str:
        outputs = f", output lengths {self.output_lengths}" if self.output_lengths else ""
        return f"{'Text' if self.kind == 'llm' else 'Pictures'}, {self.loop} loop{outputs}"

    @property
    def slug(self) -> str:
        parts = (self.kind, self.loop, (self.output_lengths or "").replace(":", "-"))
        return "_".join(part for part in parts if part)


@dataclass(frozen=True)
class Table:
    header: list[str]
    lines: list[list[str]]

    def markdown(self) -> str:
        rows = [self.header, ["---"] * len(self.header), *self.lines]
        return "".join(f"| {' | '.join(row)} |\n" for row in rows)

    def html(self) -> str:
        def row(cells: Iterable[str], tag: str) -> str:
            return "<tr>" + "".join(f"<{tag}>{html.escape(cell.strip(chr(96)))}</{tag}>" for cell in cells) + "</tr>\n"

        return f"<table>\n{row(self.header, 'th')}{''.join(row(line, 'td') for line in self.lines)}</table>\n"


def groups(measured: Sequence[Measured], models: Sequence[str], slos: Mapping[Kind, Slo]) -> list[Group]:
    """Traffic by how much is asked, in each the models in the given order; the first of each kind is the yardstick."""
    figures = {one.run: summarise(one.samples, slos.get(one.run.kind)) for one in measured}
    throughput = {run: _throughput(run.kind, figures[run]) for run in figures}
    kinds = {one.run.model: one.run.kind for one in measured}
    first: dict[Kind, str] = {}
    for model in models:
        if model in kinds:
            first.setdefault(kinds[model], model)
    yardstick = {(run.traffic, run.repeat): value for run, value in throughput.items() if run.model == first[run.kind]}

    def of_traffic(one: Measured) -> tuple[str, str, str, float, str, int]:
        traffic = one.run.traffic
        loop = (one.run.kind, traffic.output_lengths or "", traffic.loop)
        return (*loop, traffic.rate, traffic.slug, models.index(one.run.model))

    made: list[Group] = []
    for _, repeats in itertools.groupby(sorted(measured, key=of_traffic), of_traffic):
        together = list(repeats)
        row = _row(together, figures, throughput, yardstick)
        key = (row.kind, row.traffic.loop, row.traffic.output_lengths)
        if not made or (made[-1].kind, made[-1].loop, made[-1].output_lengths) != key:
            made.append(Group(*key, []))
        made[-1].rows.append(row)
    return made


def table(group: Group) -> Table:
    """Columns that no row has anything in are left out."""
    unit = "tokens/s" if group.kind == "llm" else "images/s"
    columns: list[tuple[str, Callable[[Row], str]]] = [
        ("model", lambda row: f"`{row.model}`"),
        ("traffic", lambda row: row.traffic.load),
        (unit, lambda row: number(row.throughput)),
        ("ratio", lambda row: ratio(row.ratios)),
        ("TTFT p50 / p99 ms", lambda row: latency(row.ttft, 1000)),
        ("ITL p50 / p99 ms", lambda row: latency(row.itl, 1000)),
        ("E2EL p50 / p99 s", lambda row: latency(row.e2el, 1)),
        ("goodput req/s", lambda row: number(row.goodput)),
        ("mean batch", lambda row: number(row.mean_batch)),
        ("queue ms", lambda row: number(None if row.queue is None else row.queue * 1000)),
        ("failed", lambda row: f"{row.failed} of {row.requests}" if row.failed else ""),
    ]
    if group.kind == "sdxl":  # one response: its first token is its last
        columns = [column for column in columns if not column[0].startswith(("TTFT", "ITL"))]
    cells = [[cell(row) for row in group.rows] for _, cell in columns]
    kept = [(name, column) for (name, _), column in zip(columns, cells, strict=True) if any(column)]
    return Table([name for name, _ in kept], [list(line) for line in zip(*(column for _, column in kept), strict=True)])


def number(value: float | None) -> str:
    """About three digits; nothing for None."""
    if value is None:
        return ""
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def latency(value: Latency, scale: float) -> str:
    if value.p50 is None or value.p99 is None:
        return ""
    return f"{number(value.p50 * scale)} / {number(value.p99 * scale)}"


def ratio(ratios: Sequence[float]) -> str:
    if not ratios:
        return ""
    middle = number(statistics.median(ratios))
    return middle if len(ratios) == 1 else f"{middle} ({number(ratios[0])} to {number(ratios[-1])})"


def _row(
    together: list[Measured],
    figures: dict[Run, Figures],
    throughput: dict[Run, float],
    yardstick: dict[tuple[Traffic, int], float],
) -> Row:
    runs = [one.run for one in together]
    bases = [(run, yardstick.get((run.traffic, run.repeat))) for run in runs]
    return Row(
        model=runs[0].model,
        kind=runs[0].kind,
        traffic=runs[0].traffic,
        repeats=len(runs),
        requests=sum(figures[run].requests for run in runs),
        failed=sum(figures[run].failed for run in runs),
        throughput=statistics.median(throughput[run] for run in runs),
        ratios=tuple(sorted(throughput[run] / base for run, base in bases if base)),
        ttft=_latency([figures[run].ttft for run in runs]),
        itl=_latency([figures[run].itl for run in runs]),
        e2el=_latency([figures[run].e2el for run in runs]),
        goodput=_middle([figures[run].goodput for run in runs]),
        mean_batch=_middle([batches.mean_batch(one.readings, one.run.kind) for one in together]),
        queue=_middle([batches.queue_seconds(one.readings) for one in together]),
    )


def _throughput(kind: Kind, figures: Figures) -> float:
    return figures.output_tokens_per_second if kind == "llm" else figures.images_per_second


def _latency(spreads: Sequence[Spread | None]) -> Latency:
    known = [one for one in spreads if one]
    return Latency(_middle([one.p50 for one in known]), _middle([one.p99 for one in known]))


def _middle(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None
