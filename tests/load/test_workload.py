"""What requests ask for follows from the seed and the index alone."""

import random
import statistics
from pathlib import Path

import pytest

from load.workload import Lengths, Work, from_jsonl, llm_work, llm_works, sdxl_works


def drawn(spec: str, field: str = "output_lengths", count: int = 20_000) -> list[int]:
    lengths, rng = Lengths.parse(spec, field), random.Random(0)
    return [lengths.draw(rng) for _ in range(count)]


def test_fixed_and_uniform_lengths() -> None:
    assert set(drawn("fixed:7")) == {7}
    assert set(drawn("uniform:3:6")) == {3, 4, 5, 6}


def test_exponential_lengths_have_their_mean_their_spread_and_their_limit() -> None:
    lengths = drawn("exponential:32")
    assert statistics.fmean(lengths) == pytest.approx(32, rel=0.03)
    assert statistics.pstdev(lengths) == pytest.approx(32, rel=0.05)
    assert min(lengths) == 1
    assert max(drawn("exponential:32:40")) == 40


def test_sharegpt_lengths_have_the_published_means_or_a_stated_one() -> None:
    # What lies above 2048 is cut, hence a little less.
    assert statistics.fmean(drawn("sharegpt", "prompt_lengths")) == pytest.approx(161, rel=0.03)
    assert statistics.fmean(drawn("sharegpt", "output_lengths")) == pytest.approx(330, rel=0.04)
    assert statistics.fmean(drawn("sharegpt:50")) == pytest.approx(50, rel=0.03)


@pytest.mark.parametrize(
    "spec",
    ["", "fixed", "fixed:0", "fixed:1.5", "uniform:5:2", "exponential:0.5", "exponential:3:0", "fixed:1:2", "zipf:3"],
)
def test_bad_lengths_are_named_with_what_is_allowed(spec: str) -> None:
    with pytest.raises(ValueError, match=f"prompt_lengths is {spec!r}; allowed: fixed:N, uniform:A:B"):
        Lengths.parse(spec, "prompt_lengths")


def test_works_depend_on_seed_and_index_only() -> None:
    prompts, outputs = Lengths.parse("uniform:5:9", "prompt_lengths"), Lengths.parse("exponential:8")
    works = llm_works(10, 3, prompts, outputs)
    assert works[6] == llm_work(6, 3, prompts, outputs)
    assert works == llm_works(20, 3, prompts, outputs)[:10]
    assert works != llm_works(10, 4, prompts, outputs)
    assert len({work.prompt for work in works}) == 10
    assert all(5 <= len(work.prompt.split()) <= 9 for work in works)
    assert sdxl_works(5, 1, 20) == sdxl_works(8, 1, 20)[:5]
    assert all(work.steps == 20 and work.seed is not None for work in sdxl_works(5, 1, 20))


def test_a_file_of_works(tmp_path: Path) -> None:
    file = tmp_path / "works.jsonl"
    file.write_text('{"prompt": "Hi", "max_tokens": 3}\n\n{"prompt": "a star", "steps": 4, "seed": 0}\n')
    assert from_jsonl(file) == [Work("Hi", max_tokens=3), Work("a star", steps=4, seed=0)]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 1: "),
        ('{"text": "Hi"}', 'line 1: allowed: an object with a "prompt" that is a string'),
        ('{"prompt": "Hi", "max_tokens": 0}', "line 1: max_tokens is 0; allowed: a whole number of at least 1"),
        ('{"prompt": "Hi", "steps": true}', "line 1: steps is True; allowed"),
        ('{"prompt": "Hi", "tokens": 3}', "line 1: tokens is unknown; allowed: prompt, max_tokens, steps, seed"),
        ("", "holds no work"),
    ],
)
def test_a_bad_file_is_named_with_its_line(line: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "works.jsonl"
    file.write_text(line)
    with pytest.raises(ValueError, match=message):
        from_jsonl(file)
