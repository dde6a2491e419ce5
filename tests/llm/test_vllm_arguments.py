"""vLLM's engine arguments as ours."""

import json
from pathlib import Path
from typing import Any

import pytest
import vllm_arguments
from engine.config import EngineConfig
from engine.errors import ConfigError

SAMPLE = {"model": "facebook/opt-125m", "gpu_memory_utilization": 0.1, "enforce_eager": True}


def config(values: Any, *, on_gpu: bool = False) -> EngineConfig:
    return EngineConfig.from_dict(vllm_arguments.translated(values, on_gpu=on_gpu))


def test_the_sample_of_tritons_vllm_backend_is_taken() -> None:
    assert config(SAMPLE) == EngineConfig("facebook/opt-125m")
    assert config(SAMPLE, on_gpu=True) == EngineConfig("facebook/opt-125m", memory_fraction=0.1)


@pytest.mark.parametrize(
    ("values", "same"),
    [
        ({"dtype": "half"}, {"dtype": "float16"}),
        ({"dtype": "float"}, {"dtype": "float32"}),
        ({"dtype": "bfloat16", "max_model_len": 99}, {"dtype": "bfloat16", "max_model_len": 99}),
        ({"max_num_seqs": 1000}, {"max_num_seqs": 1000, "max_num_batched_tokens": 1000}),
        ({"max_num_seqs": 8}, {"max_num_seqs": 8, "max_num_batched_tokens": 512}),
        ({"max_num_batched_tokens": 64}, {"max_num_batched_tokens": 64}),
        ({"enable_prefix_caching": None, "max_model_len": None, "quantization": None}, {}),
        ({"tensor_parallel_size": 1, "tokenizer": "a/b", "seed": 4, "swap_space": 2}, {}),
    ],
)
def test_arguments_mean_what_they_mean_to_vllm(values: dict[str, Any], same: dict[str, Any]) -> None:
    assert config({"model": "a/b"} | values) == EngineConfig("a/b", **same)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"invalid_attribute": True}, "unknown engine argument 'invalid_attribute'; known: model, "),
        ({"max_num_seq": 3}, r"unknown engine argument 'max_num_seq' \(did you mean 'max_num_seqs'\?\)"),
        ({"tensor_parallel_size": 2}, r"tensor_parallel_size is 2; allowed: 1 \(vLLM knows more"),
        ({"quantization": "awq"}, "quantization is 'awq'; allowed: None"),
        ({"tokenizer": "c/d"}, "tokenizer is 'c/d'; allowed: None"),
        ({"enable_lora": True}, "enable_lora is True; allowed: False"),
        ({"dtype": "int4"}, "dtype is 'int4'; allowed: one of auto"),
        ({"dtype": 16}, r"dtype is 16 \(int\); allowed: str"),
        ({"max_num_seqs": "many"}, r"max_num_seqs is 'many' \(str\); allowed: int"),
        ({"max_num_seqs": 0}, "max_num_seqs is 0; allowed: an integer of at least 1"),
        ({"model": None}, "model is missing"),
    ],
)
def test_what_it_does_not_do_is_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config({"model": "a/b"} | values)


@pytest.mark.parametrize(
    ("parameter", "more", "reported"),
    [
        *[(None, {}, False), ("false", {}, False), ("true", {}, True), ("yes", {}, True)],
        *[("true", {"disable_log_stats": True}, False), ("true", {"disable_log_stats": False}, True)],
    ],
)
def test_metrics_are_reported_when_vllm_backend_would(
    tmp_path: Path, parameter: str | None, more: dict[str, bool], reported: bool
) -> None:
    file = tmp_path / "model.json"
    file.write_text(json.dumps(SAMPLE | more))
    parameters = {} if parameter is None else {"REPORT_CUSTOM_METRICS": {"string_value": parameter}}
    assert vllm_arguments.read(file, parameters, on_gpu=False) == (EngineConfig("facebook/opt-125m"), reported)


def test_an_error_names_the_file(tmp_path: Path) -> None:
    for text in ("[1]", "{", '{"model": 5}'):
        (tmp_path / "model.json").write_text(text)
        with pytest.raises(ConfigError, match=r"model\.json"):
            vllm_arguments.read(tmp_path / "model.json", {}, on_gpu=False)
