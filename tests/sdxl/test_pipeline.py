"""The denoising loop: each picture as if it were alone, whatever it shares a batch with."""

import dataclasses
import io
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import StableDiffusionXLPipeline
from numpy.typing import NDArray
from PIL import Image
from pipeline.errors import Cancelled, DeadlineExceeded, PipelineFailure
from pipeline.parts import Parts
from pipeline.pipeline import Picture, Pipeline
from pipeline.schedulers import SCHEDULERS
from pipeline.trajectory import Job

from tests.sdxl.conftest import draw, job

Make = Callable[..., Pipeline]


def distance(one: Picture, other: Picture) -> int:
    return int(np.abs(one.pixels.astype(int) - other.pixels.astype(int)).max())


class Spy:
    """Counts the UNet's calls and their rows."""

    def __init__(self, unet: Any) -> None:
        self._unet = unet
        self.rows: list[int] = []

    def __call__(self, sample: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        self.rows.append(len(sample))
        return self._unet(sample, *arguments, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._unet, name)


@pytest.fixture
def spied(make: Make) -> Callable[..., tuple[Pipeline, Spy]]:
    def build(**settings: object) -> tuple[Pipeline, Spy]:
        pipeline = make(**settings)
        spy = Spy(pipeline.parts.unet)
        return Pipeline(pipeline.config, dataclasses.replace(pipeline.parts, unet=spy)), spy

    return build


@pytest.mark.parametrize("negative", ["", "a dog"])
@pytest.mark.parametrize("guidance", [0.0, 4.0])
def test_draws_what_diffusers_draws(make: Make, model_folder: Path, negative: str, guidance: float) -> None:
    reference = StableDiffusionXLPipeline.from_pretrained(model_folder, add_watermarker=False)
    reference.set_progress_bar_config(disable=True)
    image = reference(
        "a cat", negative_prompt=negative or None, guidance_scale=guidance, num_inference_steps=4,
        generator=torch.Generator().manual_seed(1),
    ).images[0]  # fmt: skip
    pipeline = make()
    (picture,) = draw(pipeline, job(pipeline, negative_prompt=negative, guidance_scale=guidance))
    assert np.abs(np.asarray(image).astype(int) - picture.pixels).max() <= 1


def mixed(pipeline: Pipeline, rng: random.Random, count: int) -> list[Job]:
    """Requests that differ in everything that requests may differ in."""
    return [
        job(
            pipeline,
            rng.choice(["a cat", "a dog", "", "two red circles"]),
            seed=rng.randrange(1000),
            steps=rng.randint(1, 6),
            scheduler=rng.choice(list(SCHEDULERS)),
            guidance_scale=rng.choice([0, 2.5, 7]),
            negative_prompt=rng.choice(["", "", "a bird"]),
            width=rng.choice([16, 16, 24]),
        )
        for _ in range(count)
    ]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("mode", "most"), [("fast", 2), ("exact", 0)])
def test_a_picture_does_not_depend_on_its_neighbours(make: Make, seed: int, mode: str, most: int) -> None:
    rng = random.Random(seed)
    pipeline = make(mode=mode, max_batch=6)
    jobs = mixed(pipeline, rng, 6)
    alone = [draw(pipeline, each)[0] for each in jobs]
    order = rng.sample(jobs, len(jobs))  # other slots, and the same neighbours in none
    together = dict(zip(order, draw(pipeline, *order), strict=True))
    assert max(distance(one, together[each]) for one, each in zip(alone, jobs, strict=True)) <= most
    if mode == "exact":
        assert [one.file for one in alone] == [together[each].file for each in jobs]


def test_what_differs_between_requests_shows_in_the_picture(make: Make) -> None:
    pipeline = make()
    changes: list[dict[str, Any]] = [
        {}, {"prompt": "a dog"}, {"seed": 2}, {"steps": 5}, {"guidance_scale": 9}, {"negative_prompt": "x"},
        {"scheduler": "euler_a"}, {"scheduler": "dpm++_2m"}, {"scheduler": "ddim"},
        {"scheduler": "lcm", "guidance_scale": 5},
    ]  # fmt: skip
    pictures = draw(pipeline, *(job(pipeline, **change) for change in changes))
    assert len({picture.pixels.tobytes() for picture in pictures}) == len(changes)


def test_unlike_requests_share_every_unet_call(spied: Callable[..., tuple[Pipeline, Spy]]) -> None:
    pipeline, spy = spied()
    names = ["euler", "euler_a", "dpm++_2m", "ddim"]
    jobs = [job(pipeline, scheduler=name, guidance_scale=2 + i, seed=i, steps=3) for i, name in enumerate(names)]
    draw(pipeline, *jobs)
    assert spy.rows == [8, 8, 8]  # four pictures, each with and without its prompt


def test_sizes_and_guidance_divide_a_batch(spied: Callable[..., tuple[Pipeline, Spy]]) -> None:
    pipeline, spy = spied()
    jobs = [job(pipeline, width=width, guidance_scale=scale, steps=1) for width in (16, 24) for scale in (0, 3, 3)]
    draw(pipeline, *jobs)
    assert sorted(spy.rows) == [1, 1, 4, 4]


def test_fewer_steps_leave_early_and_answer_first(spied: Callable[..., tuple[Pipeline, Spy]]) -> None:
    pipeline, spy = spied()
    jobs = [job(pipeline, steps=steps, guidance_scale=0) for steps in (5, 1, 3)]
    finished = []
    calls = []
    for each, _ in pipeline.run(jobs):
        finished.append(each.request.steps)
        calls.append(len(spy.rows))
    assert finished == [1, 3, 5]
    assert calls == [1, 3, 5]
    assert spy.rows == [3, 2, 2, 1, 1]


def test_exact_mode_computes_one_shape(spied: Callable[..., tuple[Pipeline, Spy]]) -> None:
    pipeline, spy = spied(mode="exact", max_batch=4)
    draw(pipeline, job(pipeline, steps=2), job(pipeline, steps=1))
    assert spy.rows == [8, 8]


def test_buckets_pad_and_large_batches_are_cut(spied: Callable[..., tuple[Pipeline, Spy]]) -> None:
    pipeline, spy = spied(max_batch=4, buckets=[2, 4])
    draw(pipeline, *(job(pipeline, steps=1, guidance_scale=0, seed=i) for i in range(7)))
    assert spy.rows == [4, 4]
    spy.rows.clear()
    draw(pipeline, job(pipeline, steps=1, guidance_scale=0))
    assert spy.rows == [2]


def test_a_cancelled_request_leaves_at_the_next_step(spied: Callable[..., tuple[Pipeline, Spy]]) -> None:
    pipeline, spy = spied()
    stays = job(pipeline, steps=4, guidance_scale=0)
    leaves = Job(job(pipeline, steps=4, guidance_scale=0, seed=2).request, is_cancelled=lambda: len(spy.rows) >= 2)
    outcomes = list(pipeline.run([stays, leaves]))
    assert spy.rows == [2, 2, 1, 1]
    assert outcomes[0][0] is leaves
    assert isinstance(outcomes[0][1], Cancelled)
    assert isinstance(outcomes[1][1], Picture)
    assert distance(outcomes[1][1], draw(pipeline, stays)[0]) <= 2


def test_a_request_whose_time_is_over_leaves_and_the_rest_goes_on(make: Make) -> None:
    pipeline = make()
    late = job(pipeline, timeout=1)
    outcomes = dict(pipeline.run([late, other := job(pipeline)]))
    assert isinstance(outcomes[late], DeadlineExceeded)
    assert "1 microseconds" in str(outcomes[late])
    assert isinstance(outcomes[other], Picture)


def test_values_that_are_no_numbers_are_an_error_not_a_black_picture(make: Make) -> None:
    pipeline = make()
    unet = pipeline.parts.unet

    def poisoned(*arguments: Any, **options: Any) -> tuple[torch.Tensor]:
        output = unet(*arguments, **options)[0].clone()
        output[0] = float("nan")
        return (output,)

    pipeline = Pipeline(pipeline.config, dataclasses.replace(pipeline.parts, unet=poisoned))
    sick, well = (job(pipeline, guidance_scale=0, seed=seed) for seed in (1, 2))
    outcomes = dict(pipeline.run([sick, well]))
    assert isinstance(outcomes[sick], PipelineFailure)
    assert "no numbers" in str(outcomes[sick])
    assert isinstance(outcomes[well], Picture)


def test_a_picture_that_fails_takes_no_other_with_it(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    pipeline = make()
    broken, well = job(pipeline, seed=3), job(pipeline, seed=4)

    def refuse(pixels: NDArray[np.uint8], format_: str, encoding: str) -> bytes:
        raise ValueError("no disk")

    object.__setattr__(broken.request, "scheduler", "none")
    outcomes = dict(pipeline.run([broken, well]))
    assert isinstance(outcomes[broken], PipelineFailure)
    assert isinstance(outcomes[well], Picture)
    monkeypatch.setattr("pipeline.picture.encode", refuse)
    assert isinstance(dict(pipeline.run([well]))[well], PipelineFailure)


def test_a_failing_unet_ends_every_request_of_its_batch_once(make: Make) -> None:
    pipeline = make()

    def explode(*arguments: object, **options: object) -> None:
        raise RuntimeError("out of memory")

    pipeline = Pipeline(pipeline.config, dataclasses.replace(pipeline.parts, unet=explode))
    jobs = [job(pipeline, guidance_scale=scale) for scale in (0, 3, 3)]
    outcomes = list(pipeline.run(jobs))
    assert {each for each, _ in outcomes} == set(jobs)
    assert len(outcomes) == len(jobs)
    assert all("out of memory" in str(outcome) for _, outcome in outcomes)


@pytest.mark.parametrize(("name", "magic"), [("png", "PNG"), ("jpeg", "JPEG"), ("webp", "WEBP")])
def test_files_are_in_the_format_asked_for(make: Make, name: str, magic: str) -> None:
    pipeline = make()
    (picture,) = draw(pipeline, job(pipeline, format=name))
    image = Image.open(io.BytesIO(picture.file))
    assert (image.format, image.size) == (magic, (16, 16))


class Counter:
    def __init__(self) -> None:
        self.batches: list[int] = []
        self.steps: list[int] = []

    def batch(self, pictures: int) -> None:
        self.batches.append(pictures)

    def step(self, pictures: int, seconds: float) -> None:
        assert seconds > 0
        self.steps.append(pictures)


def test_the_observer_sees_pictures_without_padding(make: Make, parts: Parts) -> None:
    counter = Counter()
    pipeline = make(observer=counter, mode="exact", max_batch=8)
    draw(pipeline, job(pipeline, steps=2), job(pipeline, steps=1))
    assert counter.batches == [2]
    assert counter.steps == [2, 1]
