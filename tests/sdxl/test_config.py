"""model.json: read once, checked once, and wrong ones are told by name."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from pipeline.config import PipelineConfig
from pipeline.errors import ConfigError


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([], "expected a JSON object, got list"),
        ({}, "model is missing"),
        ({"model": ""}, "model is ''"),
        ({"model": "m", "schedular": "euler"}, "unknown key 'schedular' (did you mean 'scheduler'?); known: model, "),
        ({"model": "m", "scheduler": "best"}, "scheduler is 'best'; allowed: one of euler, "),
        ({"model": "m", "dtype": "int8"}, "dtype is 'int8'; allowed: one of auto, "),
        ({"model": "m", "device": "cuda:"}, "device is 'cuda:'; allowed: auto, cpu, cuda or cuda:N"),
        ({"model": "m", "mode": "slow"}, "mode is 'slow'; allowed: one of fast, exact"),
        ({"model": "m", "max_batch": 0}, "max_batch is 0; allowed: an integer of at least 1"),
        ({"model": "m", "max_batch": True}, "max_batch is True (bool); allowed: int"),
        ({"model": "m", "steps": 200}, "steps is 200; allowed: null or an integer from 1 to 100"),
        ({"model": "m", "guidance_scale": "5"}, "guidance_scale is '5' (str); allowed: float or null"),
        ({"model": "m", "buckets": [4, 2]}, "buckets is (4, 2); allowed: an empty list, or rising sizes"),
        ({"model": "m", "buckets": [4, "16"]}, "buckets is [4, '16']; allowed: a list of integers"),
        ({"model": "m", "buckets": [4, 8]}, "that end with max_batch (16)"),
        ({"model": "m", "buckets": [4, 16], "mode": "exact"}, "one size in exact mode"),
    ],
)
def test_a_wrong_configuration_is_told_by_key_value_and_what_is_allowed(values: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        PipelineConfig.from_dict(values)
    assert message in str(caught.value)


def test_errors_name_the_file(tmp_path: Path) -> None:
    file = tmp_path / "model.json"
    with pytest.raises(ConfigError, match=f"{file} is missing"):
        PipelineConfig.from_file(file)
    file.write_text("{")
    with pytest.raises(ConfigError, match=f"{file} is not JSON"):
        PipelineConfig.from_file(file)
    file.write_text(json.dumps({"model": "m", "stepz": 1}))
    with pytest.raises(ConfigError, match=f"{file}: unknown key 'stepz'"):
        PipelineConfig.from_file(file)


def test_it_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        PipelineConfig("m").steps = 3  # type: ignore[misc]


def test_a_path_starts_at_the_model_repository_and_a_hub_id_stays(tmp_path: Path) -> None:
    repository = tmp_path / "repository"
    (tmp_path / "models" / "tiny").mkdir(parents=True)
    assert PipelineConfig("../models/tiny").resolved(repository).model == str(tmp_path / "models" / "tiny")
    assert PipelineConfig("owner/name").resolved(repository).model == "owner/name"
    assert PipelineConfig("owner/name", vae="owner/vae").resolved(repository).vae == "owner/vae"
    with pytest.raises(ConfigError, match=r"vae is './no', but .*/no is no folder"):
        PipelineConfig("owner/name", vae="./no").resolved(repository)


def test_batches_are_padded_to_the_next_bucket() -> None:
    fast = PipelineConfig("m", buckets=(2, 8, 16))
    assert [fast.padded(n) for n in (1, 2, 3, 9)] == [2, 2, 8, 16]
    assert PipelineConfig("m").padded(5) == 5
    assert PipelineConfig("m", mode="exact", max_batch=4).padded(1) == 4


@pytest.mark.parametrize("content", [b"\xff\xfe{}", b"[" * 100_000, b'{"model": 1' + b"0" * 5000 + b"}"])
def test_a_file_that_cannot_be_parsed_is_named(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "model.json"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=r"model\.json is not JSON"):
        PipelineConfig.from_file(file)


def test_a_folder_in_place_of_the_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="can't be read: Is a directory"):
        PipelineConfig.from_file(tmp_path)
