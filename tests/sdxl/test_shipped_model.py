"""The tiny model in models/: what it draws, checked by the judge that also measured its accuracy."""

import json
import random

import numpy as np
import pytest
from PIL import Image
from pipeline.config import PipelineConfig
from pipeline.loader import load_parts
from pipeline.pipeline import Pipeline

from tests.sdxl.conftest import draw, job
from tests.server.tritonserver import ROOT
from training.judge import judge
from training.shapes import caption, sample_scene

FOLDER = ROOT / "models" / "tiny-sdxl"


@pytest.fixture(scope="module")
def pipeline() -> Pipeline:
    config = PipelineConfig(str(FOLDER))
    return Pipeline(config, load_parts(config))


def test_it_is_small_and_comes_with_its_accuracy() -> None:
    assert sum(file.stat().st_size for file in FOLDER.rglob("*")) < 20e6
    figures = json.loads((FOLDER / "accuracy.json").read_text())
    assert figures["captions"] == 100
    assert figures["judge_on_1000_drawn_scenes"] >= 0.99
    assert figures["background"] >= 0.98
    assert figures["colours"] >= 0.98
    assert figures["everything"] >= 0.7


def test_it_draws_the_backgrounds_of_captions_that_it_never_saw(pipeline: Pipeline) -> None:
    rng = np.random.default_rng(123)
    scenes = [sample_scene(rng, held_out=True) for _ in range(8)]
    pictures = draw(pipeline, *(job(pipeline, caption(scene), seed=i, steps=10) for i, scene in enumerate(scenes)))
    verdicts = [judge(Image.fromarray(p.pixels), scene) for p, scene in zip(pictures, scenes, strict=True)]
    assert sum(verdict.background for verdict in verdicts) >= 7


def test_neighbours_change_no_pixel_by_more_than_two_levels(pipeline: Pipeline) -> None:
    rng, scenes = random.Random(4), np.random.default_rng(4)
    jobs = [
        job(
            pipeline,
            caption(sample_scene(scenes)),
            seed=i,
            steps=rng.randint(3, 8),
            guidance_scale=rng.uniform(1.1, 8),
            scheduler=rng.choice(["euler", "euler_a", "dpm++_2m", "ddim", "lcm"]),
        )
        for i in range(8)
    ]
    for each, together in zip(jobs, draw(pipeline, *jobs), strict=True):
        (alone,) = draw(pipeline, each)
        assert np.abs(alone.pixels.astype(int) - together.pixels).max() <= 2
