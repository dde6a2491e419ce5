"""model.json: what is taken, and in which words the rest is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
from engine.config import EngineConfig
from engine.errors import ConfigError


def test_a_file_that_names_a_model_is_enough(tmp_path: Path) -> None:
    (tmp_path / "model.json").write_text('{"model": "some/where"}')
    assert EngineConfig.from_file(tmp_path / "model.json") == EngineConfig(model="some/where")


def test_every_key_can_be_set(tmp_path: Path) -> None:
    values = {
        "model": "some/where",
        "dtype": "bfloat16",
        "quantization": "int8",
        "decoder": "fused",
        "device": "cuda:1",
        "max_num_seqs": 8,
        "max_num_batched_tokens": 8,
        "max_model_len": 100,
        "max_queue_size": 5,
        "max_queued_tokens": 4096,
        "block_size": 32,
        "num_kv_blocks": 10,
        "memory_fraction": 1,
        "enable_prefix_caching": False,
        "num_threads": 2,
    }
    assert set(values) == set(EngineConfig.__dataclass_fields__)
    (tmp_path / "model.json").write_text(json.dumps(values))
    assert vars(EngineConfig.from_file(tmp_path / "model.json")) == values


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("model", "", "a folder, a .gguf file or a hub id"),
        ("quantization", "int4", "one of none, int8, auto"),
        ("decoder", "ours", "one of auto, fused, transformers"),
        ("dtype", "int8", "one of auto, float32, bfloat16, float16"),
        ("device", "tpu", "auto, cpu, cuda or cuda:N"),
        ("device", "cpu:0", "auto, cpu, cuda or cuda:N"),
        ("device", "cuda:", "auto, cpu, cuda or cuda:N"),
        ("device", "cuda:x", "auto, cpu, cuda or cuda:N"),
        ("max_num_seqs", 0, "an integer of at least 1"),
        ("max_queue_size", 0, "an integer of at least 1"),
        ("max_num_batched_tokens", 63, "an integer of at least max_num_seqs (64)"),
        *[
            (name, 0, "null or an integer of at least 1")
            for name in ("max_model_len", "num_kv_blocks", "block_size", "num_threads")
        ],
        ("memory_fraction", 0, "null or a number in (0, 1]"),
        ("memory_fraction", 1.1, "null or a number in (0, 1]"),
        ("memory_fraction", float("nan"), "null or a number in (0, 1]"),
    ],
)
def test_a_value_out_of_range_is_refused_with_key_value_and_range(name: str, value: Any, allowed: str) -> None:
    with pytest.raises(ConfigError) as refused:
        EngineConfig.from_dict({"model": "m", name: value})
    assert str(refused.value) == f"{name} is {value!r}; allowed: {allowed}"


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("model", 5, "str"),
        ("model", None, "str"),
        ("dtype", None, "str"),
        ("max_num_seqs", "8", "int"),
        ("max_num_seqs", True, "int"),
        ("max_num_seqs", 8.0, "int"),
        ("max_num_seqs", None, "int"),
        ("max_model_len", "long", "int or null"),
        ("memory_fraction", "half", "float or null"),
        ("memory_fraction", True, "float or null"),
        ("enable_prefix_caching", 1, "bool"),
        ("enable_prefix_caching", "true", "bool"),
    ],
)
def test_a_value_of_the_wrong_type_is_refused_with_key_value_and_type(name: str, value: Any, allowed: str) -> None:
    with pytest.raises(ConfigError) as refused:
        EngineConfig.from_dict({"model": "m", name: value})
    assert str(refused.value) == f"{name} is {value!r} ({type(value).__name__}); allowed: {allowed}"


def test_an_unknown_key_is_refused_with_the_nearest() -> None:
    with pytest.raises(
        ConfigError, match=r"unknown key 'max_num_seq' \(did you mean 'max_num_seqs'\?\); known: model, "
    ):
        EngineConfig.from_dict({"model": "m", "max_num_seq": 1})


def test_a_model_must_be_named() -> None:
    with pytest.raises(ConfigError, match=r"^model is missing; allowed: a folder, a \.gguf file or a hub id$"):
        EngineConfig.from_dict({})


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"{", "is not JSON"),
        (b"", "is not JSON"),
        (b"\xff\xfe", "is not JSON"),
        (b"[" * 100_000, "is not JSON"),
        (b"[]", "expected a JSON object, got list"),
        (b"null", "expected a JSON object, got NoneType"),
        (b'{"model": "m", "max_num_seqs": 0}', "max_num_seqs is 0; allowed: "),
    ],
    ids=["open", "empty", "binary", "nested", "list", "null", "range"],
)
def test_a_file_that_is_wrong_is_named(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "model.json"
    path.write_bytes(content)
    with pytest.raises(ConfigError) as refused:
        EngineConfig.from_file(path)
    assert str(path) in str(refused.value)
    assert words in str(refused.value)


def test_a_missing_file_is_named_with_what_belongs_in_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        EngineConfig.from_file(tmp_path / "model.json")
    assert str(refused.value) == f'{tmp_path / "model.json"} is missing; it names the model: {{"model": "..."}}'


def test_a_folder_in_the_files_place_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.json").mkdir()
    with pytest.raises(ConfigError, match="can't be read"):
        EngineConfig.from_file(tmp_path / "model.json")


def test_a_relative_path_starts_at_the_given_folder(tmp_path: Path) -> None:
    (tmp_path / "weights" / "m").mkdir(parents=True)
    (tmp_path / "repository").mkdir()
    resolved = EngineConfig(model="../weights/m").resolved(tmp_path / "repository")
    assert resolved.model == str(tmp_path / "weights" / "m")
    assert EngineConfig(model=str(tmp_path / "weights")).resolved(tmp_path).model == str(tmp_path / "weights")


def test_what_is_not_on_disk_may_be_a_hub_id(tmp_path: Path) -> None:
    assert EngineConfig(model="org/name").resolved(tmp_path).model == "org/name"


@pytest.mark.parametrize("model", ["./org/name", "/org/name", "~/name", "org/name.gguf", "name", "a/b/c"])
def test_a_path_to_nothing_is_refused(tmp_path: Path, model: str) -> None:
    with pytest.raises(ConfigError) as refused:
        EngineConfig(model=model).resolved(tmp_path)
    assert str(refused.value).startswith(f"model is {model!r}, but ")
    assert str(refused.value).endswith(" does not exist")
