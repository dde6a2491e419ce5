from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from pipeline.config import PipelineConfig
from pipeline.loader import load_parts
from pipeline.parts import Parts
from pipeline.pipeline import Observer, Picture, Pipeline
from pipeline.request import parse
from pipeline.trajectory import Job

from tests.sdxl import tiny


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    # Models this small only lose time when threads wait for each other.
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def parts(model_folder: Path) -> Parts:
    return load_parts(PipelineConfig(str(model_folder)))


@pytest.fixture
def make(model_folder: Path, parts: Parts) -> Callable[..., Pipeline]:
    def make(observer: Observer | None = None, **settings: object) -> Pipeline:
        config = PipelineConfig.from_dict({"model": str(model_folder), "steps": 4, **settings})
        return Pipeline(config, parts, observer)

    return make


def job(pipeline: Pipeline, prompt: str = "a cat", **parameters: str | int | float) -> Job:
    (request,) = parse([prompt], None, {"seed": 1, **parameters}, pipeline.config, pipeline.parts.sizes)
    return Job(request)


def draw(pipeline: Pipeline, *jobs: Job) -> list[Picture]:
    """The pictures of `jobs` run as one batch, in their order."""
    outcomes = dict(pipeline.run(jobs))
    pictures = [outcomes[each] for each in jobs]
    for picture in pictures:
        assert isinstance(picture, Picture), picture
    return [picture for picture in pictures if isinstance(picture, Picture)]
