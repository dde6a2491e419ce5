"""Figures have vLLM's definitions, count from the intended start, and are exact."""

import dataclasses
import random
from pathlib import Path

import numpy as np
import pytest

from load.figures import summarise
from load.percentiles import percentile, spread
from load.samples import Sample, Writer, read, write
from load.slo import Slo

SAMPLE = Sample(
    model="llm",
    kind="llm",
    protocol="grpc",
    index=0,
    intended=1.0,
    started=1.25,
    stamps=[1.5, 1.75, 2.5],
    tokens=[1, 1, 3],
    input_tokens=9,
    ended=2.75,
    error=None,
)
FAILED = dataclasses.replace(SAMPLE, index=1, stamps=[9.0], tokens=[1], ended=9.0, error="queue is full")
PICTURE = dataclasses.replace(SAMPLE, kind="sdxl", stamps=[3.0], tokens=[0], input_tokens=None, ended=3.0)


def test_latencies_count_from_the_intended_start() -> None:
    assert SAMPLE.ttft == 0.5
    assert SAMPLE.e2el == 1.5
    assert SAMPLE.itl == [0.25, 0.75]
    assert SAMPLE.output_tokens == 5
    assert SAMPLE.tpot == (1.5 - 0.5) / (5 - 1)


def test_what_a_request_lacks_is_none() -> None:
    empty = dataclasses.replace(SAMPLE, stamps=[], tokens=[])
    assert (empty.ttft, empty.e2el, empty.tpot, empty.itl) == (None, None, None, [])
    assert dataclasses.replace(SAMPLE, stamps=[2.0], tokens=[1]).tpot is None
    assert (PICTURE.e2el, PICTURE.tpot, PICTURE.output_tokens) == (2.0, None, 0)


def test_samples_survive_their_file(tmp_path: Path) -> None:
    with Writer(tmp_path / "samples.jsonl") as writer:
        writer.write(FAILED)
        writer.write(SAMPLE)
    assert read(tmp_path / "samples.jsonl") == [SAMPLE, FAILED]  # by index


def test_what_a_killed_writer_left_of_a_line_is_no_sample(tmp_path: Path) -> None:
    file = tmp_path / "samples.jsonl"
    write(file, [SAMPLE, FAILED])
    file.write_text(file.read_text()[:-10])
    assert read(file) == [SAMPLE]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (('"kind": "llm"', '"kind": "tts"'), "line 1: kind is 'tts'; allowed: llm, sdxl"),
        (('"index"', '"number"'), "line 1: a sample has the keys"),
        (('"tokens": [1, 1, 3]', '"tokens": [1]'), "line 1: 3 stamps but 1 tokens"),
    ],
)
def test_a_wrong_line_is_named(change: tuple[str, str], message: str, tmp_path: Path) -> None:
    file = tmp_path / "samples.jsonl"
    write(file, [SAMPLE])
    file.write_text(file.read_text().replace(*change))
    with pytest.raises(ValueError, match=message):
        read(file)


@pytest.mark.parametrize("count", [1, 2, 3, 10, 999])
def test_percentiles_are_numpys(count: int) -> None:
    rng = random.Random(count)
    values = [rng.expovariate(1) for _ in range(count)]
    for nth in (0, 50, 90, 95, 99, 100):
        assert percentile(values, nth) == pytest.approx(np.percentile(values, nth), rel=1e-12)
    found = spread(values)
    assert found
    assert found.mean == pytest.approx(np.mean(values))
    assert (found.p50, found.p99) == (percentile(values, 50), percentile(values, 99))
    assert spread([]) is None


def test_figures_of_a_run() -> None:
    second = dataclasses.replace(SAMPLE, index=2, intended=2.0, stamps=[3.0], tokens=[1], ended=6.0)
    figures = summarise([SAMPLE, FAILED, second], Slo.parse("ttft=600ms"))
    assert (figures.requests, figures.failed, figures.seconds) == (3, 1, 8.0)  # 1.0 to 9.0: failing takes time, too
    assert (figures.output_tokens, figures.output_tokens_per_second) == (6, 6 / 8)
    assert (figures.requests_per_second, figures.images_per_second, figures.goodput) == (2 / 8, 0, 1 / 8)
    assert figures.ttft == spread([0.5, 1.0])
    assert figures.e2el == spread([1.5, 1.0])
    assert figures.tpot == spread([0.25])  # of one token there is no second
    assert figures.itl == spread([0.25, 0.75])


def test_figures_of_pictures() -> None:
    figures = summarise([PICTURE, dataclasses.replace(PICTURE, index=1)])
    assert (figures.images, figures.images_per_second, figures.output_tokens) == (2, 1.0, 0)
    assert (figures.tpot, figures.itl, figures.goodput, figures.slo_holds) == (None, None, None, None)


def test_nothing_measured_has_no_figures() -> None:
    figures = summarise([])
    assert (figures.requests, figures.seconds, figures.requests_per_second, figures.ttft) == (0, 0.0, 0.0, None)
