"""The LLM backend on a real tritonserver, over HTTP and gRPC."""

import concurrent.futures
import json
import random
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tritonclient.grpc as grpc
from tritonclient.utils import InferenceServerException

from tests.server.llm_client import Stream, ask, generate, generate_stream, inputs
from tests.server.tiny_llm import write_model, write_weights
from tests.server.tritonserver import TritonServer
from tests.server.waiting import wait_for

FRANCE = [{"role": "user", "content": "What is the capital of France?"}]
LONG = {"temperature": 0, "max_tokens": 3000, "ignore_eos": True}  # outlasts any test that does not end it


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    weights = write_weights(folder / "weights")
    models = folder / "models"
    write_model(models, "tiny", weights, num_kv_blocks=2000, max_num_seqs=32)
    write_model(
        models, "narrow", weights, num_kv_blocks=300, max_num_seqs=1, max_num_batched_tokens=8, max_queue_size=2
    )
    write_model(models, "small_pool", weights, num_kv_blocks=24, max_num_seqs=8)
    write_model(models, "poisoned", write_weights(folder / "poison", poison=True))
    write_model(models, "reloaded", weights)
    return models


@pytest.fixture(scope="module")
def server(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    """Several small models; those that a test loads itself, besides."""
    loaded = "tiny,narrow,small_pool,poisoned"
    log = tmp_path_factory.mktemp("log") / "log"
    with TritonServer(log, "--models", loaded, repository=repository, ready_timeout=180) as server:
        yield server


def metric(server: TritonServer, name: str, model: str) -> float:
    found = re.search(rf'^{name}{{model="{model}",version="1"}} (\S+)$', server.metric_text(), re.MULTILINE)
    assert found, f"{name} of {model} is not on the metrics page"
    return float(found[1])


def is_idle(server: TritonServer, model: str) -> bool:
    names = ("llm:kv_blocks_used", "vllm:num_requests_running", "vllm:num_requests_waiting")
    return all(metric(server, name, model) == 0 for name in names)


class TestTheDefaultModel:
    def test_streams_a_right_answer_over_http(self, llm_server: TritonServer) -> None:
        prompt = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
        asked = {"text_input": prompt, "stream": True, "max_tokens": 20, "temperature": 0}
        events = list(generate_stream(llm_server.http, "llm", **asked))
        assert len(events) > 2
        assert "Paris" in "".join(event["text_output"] for event in events)

    def test_messages_go_through_the_chat_template(self, llm_server: TritonServer) -> None:
        sampling = {"temperature": 0, "max_tokens": 20}
        answer = ask(llm_server.grpc, "llm", messages=json.dumps(FRANCE), sampling=sampling, return_finish_reason=True)
        assert answer.text == "The capital of France is Paris."
        assert answer.finals == 1
        assert [outputs["finish_reason"] for outputs in answer.outputs][-2:] == [b"None", b"stop"]

    def test_curl_with_plain_parameters(self, llm_server: TritonServer) -> None:
        asked = {"text_input": "The capital of France is", "max_tokens": 3, "temperature": 0}
        status, answer = generate(llm_server.http, "llm", **asked)
        assert (status, answer["text_output"]) == (200, "The capital of France is Paris.\n")

    def test_is_reproducible_with_a_seed(self, llm_server: TritonServer) -> None:
        texts = [
            ask(llm_server.grpc, "llm", "Once", sampling={"seed": seed, "max_tokens": 12}).text for seed in (7, 7, 8)
        ]
        assert texts[0] == texts[1] != texts[2]


class TestReplies:
    def test_whole_reply_has_the_prompt_before_it_unless_excluded(self, server: TritonServer) -> None:
        sampling = {"temperature": 0, "max_tokens": 10, "ignore_eos": True}
        with_prompt = ask(server.grpc, "tiny", "abc", stream=False, sampling=sampling)
        without = ask(server.grpc, "tiny", "abc", stream=False, exclude_input_in_output=True, sampling=sampling)
        streamed = ask(server.grpc, "tiny", "abc", sampling=sampling)
        assert with_prompt.chunks == ["abc" + without.text]
        assert without.text == streamed.text
        assert len(without.chunks) == without.finals == with_prompt.finals == 1

    def test_a_stream_comes_in_pieces(self, server: TritonServer) -> None:
        # Long, because what is ready before the sender gets to it comes in one piece.
        sampling = {"temperature": 0, "max_tokens": 200, "ignore_eos": True}
        assert len(ask(server.grpc, "tiny", "abc", sampling=sampling).chunks) > 1

    def test_optional_outputs_come_only_when_asked_for_and_add_up(self, server: TritonServer) -> None:
        sampling = {"temperature": 0, "max_tokens": 10, "ignore_eos": True, "logprobs": 2}
        names = ("finish_reason", "cumulative_logprob", "logprobs", "num_input_tokens", "num_output_tokens")
        plain = ask(server.grpc, "tiny", "abc", sampling=sampling)
        assert {name for outputs in plain.outputs for name in outputs} == {"text_output"}
        full = ask(server.grpc, "tiny", "abc", sampling=sampling, **{f"return_{name}": True for name in names})
        assert sum(outputs["num_output_tokens"] for outputs in full.outputs) == 10
        assert {int(outputs["num_input_tokens"]) for outputs in full.outputs} == {3}
        assert [outputs["finish_reason"] for outputs in full.outputs[:-1]] == [b"None"] * (len(full.outputs) - 1)
        assert full.outputs[-1]["finish_reason"] == b"length"
        tokens = [token for outputs in full.outputs for token in json.loads(outputs["logprobs"])]
        chosen = [next(entry["logprob"] for entry in token.values() if entry["rank"] == 1) for token in tokens]
        assert len(tokens) == 10
        assert all(len(token) == 2 for token in tokens)
        assert full.outputs[-1]["cumulative_logprob"] == pytest.approx(sum(chosen), abs=1e-3)

    def test_sampling_parameters_may_be_strings_and_request_parameters(self, server: TritonServer) -> None:
        as_strings = {"temperature": "0", "max_tokens": "7", "min_tokens": "7", "ignore_eos": "true"}
        one = ask(server.grpc, "tiny", "abc", sampling=as_strings)
        parameters = {"temperature": 0, "max_tokens": 7, "ignore_eos": True}
        two = ask(server.grpc, "tiny", "abc", parameters=parameters)
        half = {"temperature": 0, "ignore_eos": True}
        three = ask(server.grpc, "tiny", "abc", sampling=half, parameters={"max_tokens": 7})
        assert one.text == two.text == three.text

    def test_text_stops_before_a_stop_string(self, server: TritonServer) -> None:
        sampling = {"temperature": 0, "max_tokens": 60, "ignore_eos": True}
        whole = ask(server.grpc, "tiny", "stop", sampling=sampling).text
        stop = whole[20:23]
        answer = ask(server.grpc, "tiny", "stop", sampling=sampling | {"stop": [stop]}, return_finish_reason=True)
        assert answer.text == whole[: whole.index(stop)]
        assert answer.outputs[-1]["finish_reason"] == b"stop"
        wait_for(lambda: is_idle(server, "tiny"))

    def test_bytes_that_are_no_characters_stream_as_they_come_in_one_piece(self, server: TritonServer) -> None:
        """A random model's tokens are random bytes: streams of broken UTF-8 must still add up."""
        for seed in range(5):
            sampling = {"seed": seed, "max_tokens": 80, "ignore_eos": True}
            whole = ask(server.grpc, "tiny", "x", stream=False, exclude_input_in_output=True, sampling=sampling)
            assert ask(server.grpc, "tiny", "x", sampling=sampling).text == whole.text


class TestManyAtOnce:
    def test_32_streams_of_mixed_lengths_say_what_each_says_alone(self, server: TritonServer) -> None:
        rng = random.Random(0)
        asked = [
            (
                f"Request {index} " + "x" * rng.randrange(60),
                {"temperature": index % 2, "seed": index, "ignore_eos": True},
            )
            for index in range(32)
        ]
        asked = [(text, sampling | {"max_tokens": rng.randrange(5, 120)}) for text, sampling in asked]
        alone = [ask(server.grpc, "tiny", text, sampling=sampling).text for text, sampling in asked]
        steps = metric(server, "llm:steps_total", "tiny")
        streams = [Stream(server.grpc, "tiny", text, stream=True, sampling=sampling) for text, sampling in asked]
        answers = [stream.wait() for stream in streams]
        assert [answer.text for answer in answers] == alone
        assert [answer.finals for answer in answers] == [1] * 32
        wait_for(lambda: is_idle(server, "tiny"))
        # They did run together, as far as they came together: one after the other it takes a step for every token.
        tokens = sum(sampling["max_tokens"] for _, sampling in asked)
        assert metric(server, "llm:steps_total", "tiny") - steps < tokens / 2

    def test_output_survives_preemption(self, server: TritonServer) -> None:
        sampling = {"temperature": 0, "max_tokens": 80, "ignore_eos": True}
        texts = [f"Request {index}" for index in range(8)]
        alone = [ask(server.grpc, "small_pool", text, sampling=sampling).text for text in texts]
        streams = [Stream(server.grpc, "small_pool", text, stream=True, sampling=sampling) for text in texts]
        assert [stream.wait().text for stream in streams] == alone
        wait_for(lambda: is_idle(server, "small_pool"))
        wait_for(lambda: metric(server, "vllm:num_preemptions_total", "small_pool") > 0)

    def test_clients_that_leave_disturb_nobody_and_give_their_blocks_back(self, server: TritonServer) -> None:
        sampling = {"temperature": 0, "max_tokens": 150, "ignore_eos": True}
        texts = [f"Request {index}" for index in range(16)]
        alone = [ask(server.grpc, "tiny", text, sampling=sampling).text for text in texts]
        stay = [Stream(server.grpc, "tiny", text, stream=True, sampling=sampling) for text in texts]
        leave = [Stream(server.grpc, "tiny", f"Leaving {index}", stream=True, sampling=LONG) for index in range(16)]
        for stream in leave:
            stream.wait_for_chunks(3)
            stream.cancel()
        answers = [stream.wait() for stream in stay]
        assert [answer.text for answer in answers] == alone
        assert [answer.finals for answer in answers] == [1] * 16
        wait_for(lambda: is_idle(server, "tiny"))

    def test_thousand_short_requests_race_their_last_response_against_the_watcher(self, server: TritonServer) -> None:
        """Asking Triton whether a finished request is cancelled crashes the whole server."""

        def several(worker: int) -> list[bool]:
            sampling = {"temperature": 0, "max_tokens": 1 + worker % 3, "ignore_eos": True}
            client = grpc.InferenceServerClient(server.grpc)
            finals = []
            for _ in range(62):
                done: concurrent.futures.Future[bool] = concurrent.futures.Future()

                def take(result: grpc.InferResult, error: object, done: concurrent.futures.Future[bool] = done) -> None:
                    if error or result.get_response().parameters["triton_final_response"].bool_param:
                        done.set_result(error is None)

                client.start_stream(take)
                client.async_stream_infer("tiny", inputs("a", sampling=sampling), enable_empty_final_response=True)
                finals.append(done.result(timeout=60))
                client.stop_stream()
            client.close()
            return finals

        with concurrent.futures.ThreadPoolExecutor(16) as pool:
            finals = [final for found in pool.map(several, range(16)) for final in found]
        assert finals == [True] * 992
        assert server.is_ready()


class TestCancellation:
    def test_while_queued(self, server: TritonServer) -> None:
        first = Stream(server.grpc, "narrow", "first", stream=True, sampling=LONG).wait_for_chunks(1)
        queued = Stream(server.grpc, "narrow", "queued", stream=True, sampling=LONG)
        wait_for(lambda: metric(server, "vllm:num_requests_waiting", "narrow") == 1)
        queued.cancel()
        wait_for(lambda: metric(server, "vllm:num_requests_waiting", "narrow") == 0)
        assert metric(server, "vllm:num_requests_running", "narrow") == 1
        first.cancel()
        wait_for(lambda: is_idle(server, "narrow"))

    def test_of_a_reply_that_is_not_streamed_and_a_prompt_half_read(self, server: TritonServer) -> None:
        # 8 tokens a step: the prompt takes hundreds of steps
        stream = Stream(server.grpc, "narrow", "long " * 700, stream=False, sampling={"max_tokens": 1000})
        wait_for(lambda: metric(server, "vllm:num_requests_running", "narrow") == 1)
        stream.cancel()
        wait_for(lambda: is_idle(server, "narrow"))

    def test_http_client_that_closes_its_stream(self, server: TritonServer) -> None:
        events = generate_stream(server.http, "tiny", text_input="a", stream=True, **LONG)
        next(events)
        events.close()  # type: ignore[attr-defined]
        wait_for(lambda: is_idle(server, "tiny"))


MESSAGES_WANTED = "allowed: a non-empty JSON list of role/content objects"


class TestErrors:
    @pytest.mark.parametrize(
        ("asked", "message"),
        [
            ({}, "text_input and messages: neither is given; allowed: exactly one"),
            ({"text": "a", "messages": "[]"}, "text_input and messages: both are given; allowed: exactly one"),
            ({"text": ""}, "text_input is ''; allowed: a text of at least one token"),
            ({"text": b"\xff"}, "text_input is not UTF-8"),
            ({"messages": "{"}, "messages is not JSON"),
            ({"messages": "[" * 100_000}, "messages is not JSON"),
            ({"messages": "[]"}, MESSAGES_WANTED),
            ({"messages": '[{"role": "user"}]'}, "messages[0] is {'role': 'user'}; allowed:"),
            ({"text": "a", "sampling_parameters": "{"}, "sampling_parameters is not JSON"),
            ({"text": "a", "sampling_parameters": "[" * 100_000}, "sampling_parameters is not JSON"),
            ({"text": "a", "sampling_parameters": '{"n": ' + "9" * 5000 + "}"}, "sampling_parameters is not JSON"),
            ({"text": "a", "sampling_parameters": "[1]"}, "sampling_parameters is '[1]'; allowed: a JSON object"),
            (
                {"text": "a", "sampling": {"temprature": 1}},
                "unknown parameter 'temprature' (did you mean 'temperature'?)",
            ),
            ({"text": "a", "sampling": {"max_tokens": 0}}, "max_tokens is 0; allowed: an integer of at least 1"),
            ({"text": "a", "sampling": {"max_tokens": "many"}}, "max_tokens is 'many' (str); allowed: an integer"),
            ({"text": "a", "sampling": {"top_p": 0}}, "top_p is 0.0; allowed: a number in (0, 1]"),
            ({"text": "a", "parameters": {"top_k": -2}}, "top_k is -2; allowed: an integer of at least -1"),
            (
                {"text": "a", "sampling": {"seed": 1}, "parameters": {"seed": 2}},
                "seed is given twice, seed as 1 and seed as 2; allowed: one value",
            ),
            ({"text": "a" * 4096}, "the prompt has 4096 tokens; allowed: at most 4095"),
            (
                {"text": "a", "exclude_input_in_output": False},
                "Error generating stream: When streaming, `exclude_input_in_output` = False is not allowed.",
            ),
        ],
    )
    def test_names_what_is_wrong_and_what_is_allowed(
        self, server: TritonServer, asked: dict[str, Any], message: str
    ) -> None:
        answer = ask(server.grpc, "tiny", **asked)
        assert answer.error is not None
        assert message in answer.error
        assert len(answer.error) < 1000
        assert answer.chunks == []

    def test_is_a_bad_request_over_http(self, server: TritonServer) -> None:
        status, answer = generate(server.http, "tiny", text_input="a", max_tokens=0)
        assert (status, answer) == (400, {"error": "max_tokens is 0; allowed: an integer of at least 1"})

    def test_bad_requests_among_good_ones_hurt_nobody(self, server: TritonServer) -> None:
        sampling = {"temperature": 0, "max_tokens": 40, "ignore_eos": True}
        alone = ask(server.grpc, "tiny", "good", sampling=sampling).text
        streams = [
            Stream(server.grpc, "tiny", "good" if good else "", stream=True, sampling=sampling)
            for good in [True, False] * 8
        ]
        answers = [stream.wait() for stream in streams]
        assert [answer.text for answer in answers[::2]] == [alone] * 8
        assert all(answer.error and "text_input is ''" in answer.error for answer in answers[1::2])

    def test_full_queue_refuses_at_once(self, server: TritonServer) -> None:
        held = [Stream(server.grpc, "narrow", f"held {i}", stream=True, sampling=LONG) for i in range(3)]
        wait_for(lambda: metric(server, "vllm:num_requests_waiting", "narrow") == 2)
        status, answer = generate(server.http, "narrow", text_input="a")
        assert status >= 400  # 400 on Triton 2.51, which keeps no status of a response that is an error
        assert answer == {"error": "the queue is full: 2 waiting; allowed: 2"}
        for stream in held:
            stream.cancel()
        wait_for(lambda: is_idle(server, "narrow"))

    def test_nan_ends_the_request_not_the_model(self, server: TritonServer) -> None:
        for _ in range(5):
            status, answer = generate(server.http, "poisoned", text_input="a")
            assert status >= 400
            assert answer == {"error": "the model computed NaN or infinite logits"}
        wait_for(lambda: is_idle(server, "poisoned"))


class TestLoading:
    def test_unloading_lets_streams_end_and_loading_again_works(self, server: TritonServer) -> None:
        client = grpc.InferenceServerClient(server.grpc)
        sampling = {"temperature": 0, "max_tokens": 400, "ignore_eos": True}
        for _ in range(2):
            client.load_model("reloaded")
            stream = Stream(server.grpc, "reloaded", "a", stream=True, sampling=sampling).wait_for_chunks(1)
            processes = len(server.processes())
            client.unload_model("reloaded")
            answer = stream.wait()
            assert (answer.finals, answer.error) == (1, None)
            assert len(answer.text.encode(errors="replace")) >= 200
            wait_for(lambda before=processes: len(server.processes()) == before - 1)  # type: ignore[misc]

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"max_num_seq": 3}, "unknown key 'max_num_seq' (did you mean 'max_num_seqs'?)"),
            ({"block_size": "16"}, "block_size is '16' (str); allowed: int or null"),
            ({"dtype": "int3"}, "dtype is 'int3'; allowed: one of auto, float32, bfloat16, float16"),
            ({"device": "cuda"}, "device is 'cuda', but torch sees no CUDA device"),
            ({"model": "../nothing.gguf"}, "model is '../nothing.gguf', but"),
            ({"max_model_len": 5000}, "max_model_len is 5000; allowed: at most 4096"),
        ],
    )
    def test_what_is_wrong_in_model_json_is_named(
        self, server: TritonServer, repository: Path, arguments: dict[str, Any], message: str
    ) -> None:
        name = f"wrong_{abs(hash(message))}"
        write_model(repository, name, repository.parent / "weights", **arguments)
        with pytest.raises(InferenceServerException) as error:
            grpc.InferenceServerClient(server.grpc).load_model(name)
        assert message in str(error.value)


def test_metrics_are_the_truth(server: TritonServer) -> None:
    names = ("vllm:prompt_tokens_total", "vllm:generation_tokens_total")
    before = [metric(server, name, "tiny") for name in names]
    sampling = {"temperature": 0, "max_tokens": 21, "ignore_eos": True}
    streams = [Stream(server.grpc, "tiny", "12345", stream=True, sampling=sampling) for _ in range(10)]
    for stream in streams:
        stream.wait()
    wanted = [before[0] + 50, before[1] + 210]
    wait_for(lambda: [metric(server, name, "tiny") for name in names] == wanted)


def test_histograms_count_every_request_and_token_once(server: TritonServer) -> None:
    requests, gaps = "vllm:time_to_first_token_seconds", "vllm:inter_token_latency_seconds"
    sampling = {"temperature": 0, "max_tokens": 6, "ignore_eos": True}
    ask(server.grpc, "tiny", "a", sampling=sampling)
    time.sleep(
        4
    )  # histograms are renewed every two seconds, a counter after the other: until this request is in all of them

    def counts() -> list[float]:
        buckets = [bucket(server, name, "tiny", "+Inf") for name in (requests, gaps)]
        return [*(metric(server, f"{name}_count", "tiny") for name in (requests, gaps)), *buckets]

    before, began = counts(), metric(server, f"{requests}_sum", "tiny")
    streams = [Stream(server.grpc, "tiny", "12345", stream=True, sampling=sampling) for _ in range(4)]
    for stream in streams:
        stream.wait()
    wait_for(lambda: counts() == [value + more for value, more in zip(before, (4, 20, 4, 20), strict=True)])
    assert 0 < metric(server, f"{requests}_sum", "tiny") - began < 60
    assert bucket(server, requests, "tiny", "0.001") <= bucket(server, requests, "tiny", "60")


def bucket(server: TritonServer, name: str, model: str, bound: str) -> float:
    lines = [line for line in server.metric_text().splitlines() if line.startswith(f"{name}_bucket{{")]
    (line,) = [line for line in lines if f'model="{model}"' in line and f'le="{bound}"' in line]
    return float(line.rsplit(" ", 1)[1])
