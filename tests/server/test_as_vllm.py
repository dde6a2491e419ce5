"""Model directories of Triton's vllm_backend, served by this engine in its place: scripts/serve --as-vllm."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tritonclient.grpc as grpc
from tritonclient.utils import InferenceServerException

from tests.server.llm_client import Stream, ask
from tests.server.tiny_llm import write_weights
from tests.server.tritonserver import TritonServer
from tests.server.waiting import wait_for

CONFIG = 'backend: "vllm"\ninstance_group [{ count: 1, kind: KIND_MODEL }]\n'
METRICS = 'parameters { key: "REPORT_CUSTOM_METRICS" value { string_value: "true" } }\n'


def write(repository: Path, name: str, config: str, **arguments: Any) -> None:
    (repository / name / "1").mkdir(parents=True)
    (repository / name / "config.pbtxt").write_text(config)
    values = {"gpu_memory_utilization": 0.1, "enforce_eager": True} | arguments
    (repository / name / "1" / "model.json").write_text(json.dumps(values))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    folder = tmp_path_factory.mktemp("vllm")
    weights, repository = str(write_weights(folder / "weights")), folder / "models"
    write(repository, "plain", CONFIG, model=weights)
    write(repository, "metered", CONFIG + METRICS, model=weights)
    write(repository, "quiet", CONFIG + METRICS, model=weights, disable_log_stats=True)
    write(repository, "wrong", CONFIG, model=weights, invalid_attribute=True)
    args = ("--as-vllm", "--models", "plain,metered,quiet", "--log-verbose=1")
    with TritonServer(folder / "log", *args, repository=repository) as server:
        yield server


def test_it_answers_as_the_backend_llm_does(server: TritonServer) -> None:
    sampling = {"temperature": "0", "top_p": "1"}  # strings, as vllm_backend's clients send them
    answer = ask(server.grpc, "plain", "In this example,", sampling=sampling, return_finish_reason=True)
    assert answer.finals == 1
    assert answer.outputs[-1]["finish_reason"] in (b"length", b"stop")
    whole = ask(server.grpc, "plain", "In this example,", sampling=sampling, stream=False)
    assert whole.text == "In this example," + answer.text


def test_metrics_are_reported_where_config_and_arguments_ask_for_them(server: TritonServer) -> None:
    sampling = {"ignore_eos": True, "max_tokens": 5, "n": 2}
    for model in ("plain", "metered", "quiet"):
        ask(server.grpc, model, "abc", sampling=sampling)
    labels = '{model="metered",version="1"}'
    wanted = {
        "vllm:prompt_tokens_total": 6,
        "vllm:generation_tokens_total": 10,
        "vllm:time_to_first_token_seconds_count": 2,
        "vllm:time_per_output_token_seconds_count": 8,
        "vllm:request_time_per_output_token_seconds_count": 2,
        "vllm:request_prompt_tokens_sum": 6,
        "vllm:request_generation_tokens_sum": 10,
        "vllm:request_params_n_sum": 2,
        "vllm:request_params_n_count": 1,
    }

    def shown() -> bool:
        lines = server.metric_text().splitlines()
        return all(f"{name}{labels} {value}" in lines for name, value in wanted.items())

    wait_for(shown)
    models = {
        line.partition('model="')[2].partition('"')[0] for line in server.metric_text().splitlines() if "vllm:" in line
    }
    assert models - {""} == {"metered"}


def test_an_unknown_argument_fails_the_load_by_name(server: TritonServer) -> None:
    with (
        grpc.InferenceServerClient(server.grpc) as client,
        pytest.raises(InferenceServerException, match="unknown engine argument 'invalid_attribute'"),
    ):
        client.load_model("wrong")


def test_the_log_has_a_line_for_each_request_and_nobodys_text(server: TritonServer) -> None:
    ask(server.grpc, "plain", "secret", sampling={"max_tokens": 3, "ignore_eos": True}, request_id="seen")
    ask(server.grpc, "plain", "secret", sampling={"max_tokens": -1}, request_id="wrong")
    stream = Stream(server.grpc, "plain", "secret", stream=True, sampling={"max_tokens": 4000}, request_id="left")
    stream.wait_for_chunks(1).cancel()
    lines = (
        "[vllm] request 'seen': 6 prompt tokens, 3 tokens, length,",
        "[vllm] request 'wrong' refused: InvalidRequest",
        "[vllm] Cancelling the request 'left'",  # words that vllm_backend's own tests look for
        "[vllm] Successfully cancelled the request 'left'",
        "[vllm] engine arguments of vLLM without effect here: enforce_eager, gpu_memory_utilization",
    )
    wait_for(lambda: all(line in server.log_text for line in lines))
    assert "secret" not in server.log_text
