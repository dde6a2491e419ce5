"""Tables and plots say what the samples say."""

import base64
import json
import re
from pathlib import Path

import pytest

from load import batches, plots, report, seats
from load.plan import Traffic
from load.slo import Slo
from load.table import Latency, Measured, Table, groups, number, ratio, table
from tests.load.synthetic import picture, run, store, text, traffic

# Two requests in 4 s with 8 tokens, and in 2 s with as many: 2 and 4 tokens/s.
SLOW = [text(0, 0.0, [1.0, 2.0, 3.0, 4.0]), text(1, 0.0, [1.0, 2.0, 3.0, 4.0])]
FAST = [text(0, 0.0, [0.5, 1.0, 1.5, 2.0]), text(1, 0.0, [0.5, 1.0, 1.5, 2.0])]
# 8 tokens in 4 passes; two requests that waited 3 s together.
READINGS = [
    {
        "time": 0.0,
        "vllm:generation_tokens_total": 100.0,
        "llm:steps_total": 50.0,
        "nv_inference_count": 9.0,
        "nv_inference_queue_duration_us": 1e6,
    },
    {"time": 2.0, "vllm:generation_tokens_total": 104.0},  # a page that was read half-way
    {
        "time": 4.0,
        "vllm:generation_tokens_total": 108.0,
        "llm:steps_total": 54.0,
        "nv_inference_count": 11.0,
        "nv_inference_queue_duration_us": 4e6,
    },
]
MACHINE = {"cpu": "A <CPU>", "cores": 2, "memory_gib": 8.0, "gpus": [], "system": "Linux 1", "load_average": 0.1}


def about(*models: tuple[str, str, int]) -> dict[str, object]:
    return {
        "started": "2024-05-06 07:08:09 +0000",
        "commands": ["scripts/load compare --slo 'ttft=1s'"],
        "left_out": ["llm_static at 4 at once: it leaves with 16 passengers, which never come."],
        "machine": MACHINE,
        "versions": {"python": "3.11.2"},
        "commit": "abc",
        "arguments": {},
        "models": [
            {"name": name, "kind": kind, "seats": places, "waits_until_full": False} for name, kind, places in models
        ],
    }


def test_table_has_the_exact_figures() -> None:
    load = traffic(2)
    measured = [Measured(run("llm", load), FAST, READINGS), Measured(run("llm_unbatched", load), SLOW, [])]
    (group,) = groups(measured, ["llm_unbatched", "llm"], {"llm": Slo.parse("e2e=3s")})
    assert table(group) == Table(
        [
            *("model", "traffic", "tokens/s", "ratio", "TTFT p50 / p99 ms", "ITL p50 / p99 ms", "E2EL p50 / p99 s"),
            *("goodput req/s", "mean batch", "queue ms"),
        ],
        [
            ["`llm_unbatched`", "2/s", "2.00", "1.00", "1000 / 1000", "1000 / 1000", "4.00 / 4.00", "0.00", "", ""],
            ["`llm`", "2/s", "4.00", "2.00", "500 / 500", "500 / 500", "2.00 / 2.00", "1.00", "2.00", "1500"],
        ],
    )


def test_markdown_of_a_table() -> None:
    assert Table(["a", "b"], [["1", "2"]]).markdown() == "| a | b |\n| --- | --- |\n| 1 | 2 |\n"


def test_failed_requests_get_a_column_only_when_there_are_some() -> None:
    failed = text(1, 0.0, [], error="refused")
    (group,) = groups([Measured(run("llm", traffic()), [SLOW[0], failed], [])], ["llm"], {})
    assert table(group).header[-1] == "failed"
    assert table(group).lines[0][-1] == "1 of 2"


def test_ratios_are_taken_repeat_by_repeat_against_the_first_model() -> None:
    """Of a machine that halves its speed after the first repeat nothing shows in the ratio."""
    load = traffic()
    half = [text(index, 0.0, [2 * stamp for stamp in sample.stamps]) for index, sample in enumerate(SLOW)]
    measured = [
        Measured(run("llm_unbatched", load, 0), SLOW, []),
        Measured(run("llm", load, 0), FAST, []),
        Measured(run("llm_unbatched", load, 1), half, []),
        Measured(run("llm", load, 1), SLOW, []),
    ]
    (group,) = groups(measured, ["llm_unbatched", "llm"], {})
    assert [(row.throughput, row.ratios, row.repeats) for row in group.rows] == [
        (1.5, (1.0, 1.0), 2),
        (3.0, (2.0, 2.0), 2),
    ]
    assert group.rows[1].e2el == Latency(3.0, 3.0)


def test_a_model_without_yardstick_has_no_ratio() -> None:
    measured = [
        Measured(run("llm_static", traffic(users=16)), SLOW, []),
        Measured(run("llm", traffic(users=16)), FAST, []),
        Measured(run("llm", traffic(users=4)), FAST, []),
    ]
    (group,) = groups(measured, ["llm_static", "llm"], {})
    assert [(row.traffic.load, row.model, row.ratios) for row in group.rows] == [
        ("4 at once", "llm", ()),
        ("16 at once", "llm_static", (1.0,)),
        ("16 at once", "llm", (2.0,)),
    ]


def test_kinds_loops_and_output_lengths_stand_in_tables_of_their_own() -> None:
    measured = [
        Measured(run("llm", traffic(10)), FAST, []),
        Measured(run("llm", traffic(9)), FAST, []),
        Measured(run("llm", traffic(9, outputs="fixed:32")), FAST, []),
        Measured(run("llm", traffic(users=4)), FAST, []),
        Measured(run("sdxl", traffic(9), kind="sdxl"), [picture(0, 0.0, 0.5), picture(1, 0.0, 1.0)], []),
    ]
    made = {group.slug: group for group in groups(measured, ["sdxl", "llm"], {})}
    assert set(made) == {"llm_open", "llm_closed", "llm_open_fixed-32", "sdxl_open"}
    assert [row.traffic.load for row in made["llm_open"].rows] == ["9/s", "10/s"], "by rate, not by name"
    assert table(made["sdxl_open"]) == Table(
        ["model", "traffic", "images/s", "ratio", "E2EL p50 / p99 s"],
        [["`sdxl`", "9/s", "2.00", "1.00", "0.75 / 0.99"]],
    )


def test_numbers_have_about_three_digits() -> None:
    assert [number(value) for value in (None, 0.0, 0.126, 1.234, 12.34, 1234.5)] == [
        "", "0.00", "0.13", "1.23", "12.3", "1234"
    ]  # fmt: skip
    assert [ratio(values) for values in ((), (2.0,), (1.0, 2.0, 4.0))] == ["", "2.00", "2.00 (1.00 to 4.00)"]


def test_mean_batch_counts_passes_not_requests() -> None:
    assert batches.mean_batch(READINGS, "llm") == 2.0
    assert batches.queue_seconds(READINGS) == 1.5
    pictures = [{"time": 0.0, "nv_inference_count": 4.0, "nv_inference_exec_count": 1.0}]
    pictures.append({"time": 1.0, "nv_inference_count": 20.0, "nv_inference_exec_count": 3.0})
    assert batches.mean_batch(pictures, "sdxl") == 8.0


def test_mean_batch_is_unknown_where_nothing_was_counted() -> None:
    assert batches.mean_batch([], "llm") is None
    assert batches.mean_batch(READINGS[:1], "llm") is None
    assert batches.mean_batch([READINGS[0], READINGS[0]], "llm") is None
    assert batches.mean_batch([READINGS[2], READINGS[0]], "llm") is None, "a restarted server counts from 0"


def test_batch_over_time_is_0_where_nothing_drives() -> None:
    def reading(time: float, tokens: float, steps: float) -> dict[str, float]:
        return {"time": time, "vllm:generation_tokens_total": tokens, "llm:steps_total": steps}

    readings = [reading(0, 0, 0), reading(0.5, 4, 1), reading(1, 8, 2), reading(2, 8, 2), reading(3, 10, 4)]
    assert batches.over_time(readings, "llm") == [(1, 4.0), (2, 0.0), (3, 1.0)]


def test_metrics_of_a_killed_run_lack_their_last_line(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"time": 1.0}\n{"time": 2')
    assert batches.read(tmp_path / "metrics.jsonl") == [{"time": 1.0}]
    assert batches.read(tmp_path / "none.jsonl") == []


def test_each_request_takes_the_lowest_free_lane() -> None:
    ridden = seats.rides(
        [
            text(0, 0, [1, 2, 5]),
            text(1, 0, [2, 3]),
            text(2, 0, [2.5, 4]),
            text(3, 0, [3, 6]),  # gets on where request 1 gets off
            text(4, 0, [4.5, 7]),  # request 2's
            text(5, 0, [5, 6]),  # request 0's
            text(6, 0, [5.5, 6]),  # all three are taken
        ]
    )
    assert [(ride.index, ride.lane) for ride in ridden] == [(0, 0), (1, 1), (2, 2), (3, 1), (4, 2), (5, 0), (6, 3)]
    assert (ridden[3].begin, ridden[3].end) == (3, 6)
    assert seats.seats_used(ridden) == 4


def test_what_never_sat_gets_no_lane() -> None:
    assert seats.rides([text(0, 0, []), text(1, 0, [1])]) == []
    assert seats.seats_used([]) == 0
    assert seats.mean_seats([]) == 0


def test_mean_seats_leave_out_the_time_at_the_stop() -> None:
    # Two passengers for 2 s, one of them for 2 s more, then nobody for 10 s, then one for 4 s.
    ridden = seats.rides([text(0, 0, [0, 4]), text(1, 0, [0, 2]), text(2, 0, [14, 18])])
    assert seats.mean_seats(ridden) == pytest.approx((4 + 2 + 4) / (4 + 4))


def test_run_to_completion_shows_as_empty_seats() -> None:
    """Four seats, answers of 1, 1, 1 and 5 s: 2 passengers on average. Refilled at once it would be nearly 4."""
    batched = [text(i, 0, [0, 5 if i == 3 else 1]) for i in range(4)]
    refilled = [text(i, 0, [i // 4, i // 4 + 1]) for i in range(20)]
    assert seats.mean_seats(seats.rides(batched)) == pytest.approx(1.6)
    assert seats.mean_seats(seats.rides(refilled)) == pytest.approx(4.0)
    assert seats.seats_used(seats.rides(refilled)) == 4


def drawn(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[plots.Panel], str]]:
    calls: list[tuple[list[plots.Panel], str]] = []
    monkeypatch.setattr(plots, "bus", lambda panels, title, path: calls.append((list(panels), title)))
    return calls


def test_the_bus_picture_shows_the_highest_load_that_all_were_measured_at(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = drawn(monkeypatch)
    monkeypatch.setattr(plots, "throughput_against_latency", lambda *_: None)
    monkeypatch.setattr(plots, "percentiles_by_load", lambda *_: None)
    loads = {rate: traffic(rate) for rate in (1, 2, 4)}
    measured = [Measured(run("llm", load, 1), [], []) for load in loads.values()]
    measured += [Measured(run("llm", load), FAST, []) for load in loads.values()]
    measured += [Measured(run("llm_dynamic", loads[rate]), SLOW, []) for rate in (1, 2)]
    names = ["llm_dynamic", "llm"]
    (group,) = groups(measured, names, {})
    report.draw(
        group, measured, [{"name": name, "seats": 16 if name == "llm_dynamic" else 0} for name in names], Path()
    )
    ((panels, title),) = calls
    assert title.endswith("2/s")
    assert [(one.model, one.rows, one.ended, one.throughput) for one in panels] == [
        ("llm_dynamic", 16, 4.0, 2.0),
        ("llm", 2, 2.0, 4.0),
    ]


def folder_with_runs(folder: Path) -> Path:
    (folder / "failures.json").write_text(json.dumps({"llm.9-s.0": "not enough users"}))
    (folder / "run.json").write_text(
        json.dumps(about(("llm_unbatched", "llm", 1), ("llm", "llm", 0), ("sdxl", "sdxl", 16)))
    )
    for load in (traffic(1), traffic(2)):
        store(folder, run("llm_unbatched", load), SLOW)
        store(folder, run("llm", load), FAST, READINGS)
    store(folder, run("sdxl", Traffic(None, 2, 2, None, None), kind="sdxl"), [picture(0, 0.0, 0.5)])
    return folder


def test_report_needs_no_other_file(tmp_path: Path) -> None:
    markdown = report.write(folder_with_runs(tmp_path), {"llm": Slo.parse("ttft=1s")})
    page = (tmp_path / "report.html").read_text()
    pictures = {path.name for path in tmp_path.glob("*.png")}
    assert pictures == {
        "throughput_llm_open.png",
        "latency_llm_open.png",
        "bus_llm_open.png",
        "throughput_sdxl_closed.png",
        "latency_sdxl_closed.png",
        "batches_sdxl_closed.png",
    }
    sources = re.findall(r'(?:src|href)="([^"]*)"', page)
    assert len(sources) == len(pictures)
    for source in sources:
        data = base64.b64decode(source.removeprefix("data:image/png;base64,"), validate=True)
        assert data.startswith(b"\x89PNG")
    assert set(re.findall(r"\]\((\w+\.png)\)", markdown)) == pictures
    assert (tmp_path / "table.md").read_text() == markdown


def test_report_says_what_was_measured_on_what_and_what_was_not(tmp_path: Path) -> None:
    markdown = report.write(folder_with_runs(tmp_path), {})
    page = (tmp_path / "report.html").read_text()
    assert "A <CPU>, 2 cores, 8 GiB, no GPU" in markdown
    assert "A &lt;CPU&gt;" in page
    for text_of in (markdown, page):
        assert "scripts/load compare --slo" in text_of
        assert "which never come" in text_of
        assert "llm.9-s.0 failed: not enough users" in text_of
    assert "| `llm` | 2/s | 4.00 | 2.00 |" in markdown
    assert "<td>llm</td><td>2/s</td><td>4.00</td><td>2.00</td>" in page


def test_runs_that_are_not_complete_are_no_part_of_a_report(tmp_path: Path) -> None:
    folder = folder_with_runs(tmp_path)
    half = folder / report.RUNS / "llm.4-s.0.part"
    half.mkdir()
    (half / "run.json").write_text("{}")
    assert len(report.read(folder)) == 5


def test_a_comparison_that_was_interrupted_at_once_still_reports(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(json.dumps(about()))
    assert report.write(tmp_path, {}).startswith(f"# {tmp_path.name}\n")
