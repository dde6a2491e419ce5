"""A comparison's plots, as PNG files. Each takes what it draws and the path it writes to."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, NullFormatter

from load.seats import Ride, mean_seats, seats_used
from load.table import Group, Row

COLOURS = [matplotlib.colormaps["tab10"](place) for place in range(10)]
RIDERS = [matplotlib.colormaps["tab20"](place) for place in range(20)]
EMPTY = "#ececec"


@dataclass(frozen=True)
class Panel:
    """One model's seats during one run."""

    model: str
    rides: list[Ride]
    seats: int  # 0: as many as were taken
    ended: float  # seconds since the run's start
    throughput: float  # output tokens per second

    @property
    def rows(self) -> int:
        return max(self.seats, seats_used(self.rides), 1)


def throughput_against_latency(group: Group, path: Path) -> None:
    """One line a model, one point a traffic: to the right and down is better."""
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for model, rows, colour in _by_model(group):
        known = [row for row in rows if row.e2el.p99 is not None]
        points = [(row.throughput, row.e2el.p99 or 0.0) for row in known]
        axes.plot([x for x, _ in points], [y for _, y in points], "o-", color=colour, label=model)
        for row, point in zip(known, points, strict=True):
            axes.annotate(row.traffic.load, point, textcoords="offset points", xytext=(5, 4), fontsize=7)
    _logarithmic(axes)
    axes.set_xlim(left=0)
    axes.set_xlabel("output tokens/s" if group.kind == "llm" else "images/s")
    axes.set_ylabel("end-to-end latency p99, s")
    axes.legend()
    _finish(figure, axes, f"Throughput against latency. {group.title}", path)


def percentiles_by_load(group: Group, path: Path) -> None:
    """TTFT, ITL and E2EL: p50 solid, p99 dashed. Of pictures E2EL only."""
    metrics = [("TTFT", "ttft"), ("ITL", "itl"), ("E2EL", "e2el")]
    metrics = [
        (title, name) for title, name in metrics if any(getattr(row, name).p50 is not None for row in group.rows)
    ]
    if group.kind == "sdxl":
        metrics = metrics[-1:]
    loads = list(dict.fromkeys(row.traffic.load for row in group.rows))
    figure = Figure(figsize=(4.5 * max(len(metrics), 1.5), 4.5), layout="constrained")
    panels = figure.subplots(1, max(len(metrics), 1), squeeze=False)[0]
    for axes, (title, name) in zip(panels, metrics, strict=False):
        for model, rows, colour in _by_model(group):
            places = [loads.index(row.traffic.load) for row in rows]
            for share, style in (("p50", "o-"), ("p99", "s--")):
                values = [getattr(getattr(row, name), share) for row in rows]
                points = [(place, value) for place, value in zip(places, values, strict=True) if value is not None]
                label = model if share == "p50" else None
                axes.plot([x for x, _ in points], [y for _, y in points], style, color=colour, label=label)
        axes.set_xticks(range(len(loads)), loads)
        _logarithmic(axes)
        axes.set_title(title, fontsize=10)
        axes.set_ylabel("seconds")
        axes.grid(alpha=0.3)
    handles, labels = panels[0].get_legend_handles_labels()
    handles += [Line2D([], [], color="black", linestyle=style) for style in ("-", "--")]
    figure.legend(handles, [*labels, "p50", "p99"], fontsize=8, loc="outside lower center", ncols=len(handles))
    figure.suptitle(f"Latency by load. {group.title}", fontsize=11)
    figure.savefig(path, dpi=130)


def bus(panels: Sequence[Panel], title: str, path: Path) -> None:
    """The bus picture: one panel a model, one lane a seat, one bar a request from its first to its last token.

    All panels show the same seconds, from the first token on until the fastest model is through and a little longer.
    """
    ends = [panel.ended for panel in panels if panel.rides]
    until = 1.1 * min(ends) if ends else 1.0
    heights = [max(4, min(panel.rows, 32)) for panel in panels]
    figure = Figure(figsize=(11, 0.7 * len(panels) + 0.1 * sum(heights)), layout="constrained")
    rows = figure.subplots(len(panels), 1, sharex=True, squeeze=False, gridspec_kw={"height_ratios": heights})
    for axes, panel in zip(rows[:, 0], panels, strict=True):
        axes.set_facecolor(EMPTY)
        axes.barh(
            [ride.lane for ride in panel.rides],
            [ride.end - ride.begin for ride in panel.rides],
            left=[ride.begin for ride in panel.rides],
            height=0.86,
            color=[RIDERS[ride.index % len(RIDERS)] for ride in panel.rides],
        )
        axes.set_ylim(panel.rows - 0.5, -0.5)
        axes.set_yticks([0, panel.rows - 1] if panel.rows > 1 else [0], ["1", str(panel.rows)][: panel.rows])
        axes.set_ylabel("seat", fontsize=8)
        later = f"; goes on until {panel.ended:.0f} s" if panel.ended > until else f"; done after {panel.ended:.0f} s"
        filled = f"{mean_seats(panel.rides):.1f} of {panel.rows} seats filled while it drives"
        if not panel.seats:  # of a bus as long as needed, unused seats say nothing
            filled = f"{mean_seats(panel.rides):.1f} seats filled while it drives, {panel.rows} at most"
        axes.set_title(f"{panel.model}: {filled}, {panel.throughput:.1f} tokens/s{later}", fontsize=9, loc="left")
    rows[-1, 0].set_xlim(0, until)
    rows[-1, 0].set_xlabel("seconds since the run's start; a bar is one request, from its first token to its last")
    figure.suptitle(title, fontsize=11)
    figure.savefig(path, dpi=130)


def batches_over_time(series: Sequence[tuple[str, list[tuple[float, float]]]], title: str, path: Path) -> None:
    """series: of each model (seconds, mean batch), as Triton's metrics tell it."""
    figure = Figure(figsize=(11, 4), layout="constrained")
    axes = figure.subplots()
    for (model, points), colour in zip(series, _colours(len(series)), strict=True):
        axes.step([time for time, _ in points], [size for _, size in points], where="pre", color=colour, label=model)
    axes.set_xlabel("seconds")
    axes.set_ylabel("mean batch")
    axes.set_ylim(bottom=0)
    axes.legend()
    _finish(figure, axes, title, path)


def _by_model(group: Group) -> list[tuple[str, list[Row], tuple[float, ...]]]:
    models = list(dict.fromkeys(row.model for row in group.rows))
    rows = [[row for row in group.rows if row.model == model] for model in models]
    return list(zip(models, rows, _colours(len(models)), strict=True))


def _colours(count: int) -> list[tuple[float, ...]]:
    return [COLOURS[index % len(COLOURS)] for index in range(count)]


def _logarithmic(axes: Axes) -> None:
    """With plain numbers at its ticks."""
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter(NullFormatter())


def _finish(figure: Figure, axes: Axes, title: str, path: Path) -> None:
    axes.grid(alpha=0.3)
    axes.set_title(title, fontsize=11)
    figure.savefig(path, dpi=130)
