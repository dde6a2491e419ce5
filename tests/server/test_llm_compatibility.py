"""The requests of other servers' clients and of load tools, as these send them."""

import json
import queue
import re
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpc

from tests.server.llm_client import Stream, ask, generate
from tests.server.tiny_llm import vocabulary
from tests.server.tritonserver import TritonServer

GREEDY = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}
TYPES = {"max_tokens": "INT32", "pad_id": "INT32", "min_length": "INT32"}
TYPES |= {"temperature": "FP32", "random_seed": "UINT64", "stream": "BOOL", "exclude_input_in_output": "BOOL"}
TYPES |= {f"return_{name}": "BOOL" for name in ("finish_reason", "logprobs", "num_input_tokens", "num_output_tokens")}
ARRAYS: dict[str, Any] = {"INT32": np.int32, "FP32": np.float32, "UINT64": np.uint64, "BOOL": np.bool_, "BYTES": object}


def tensors(**values: Any) -> list[grpc.InferInput]:
    """As TensorRT-LLM's clients make them: one for each parameter, texts and lists of texts as BYTES."""
    made = []
    for name, value in values.items():
        kind = TYPES.get(name, "BYTES")
        items = [item.encode() if isinstance(item, str) else item for item in np.atleast_1d(value).tolist()]
        made.append(grpc.InferInput(name, [len(items)], kind))
        made[-1].set_data_from_numpy(np.array(items, dtype=ARRAYS[kind]))
    return made


def answered(
    url: str, inputs: list[grpc.InferInput], parameters: dict[str, Any] | None = None
) -> list[dict[str, np.ndarray]]:
    """All responses, with all elements of their tensors."""
    answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
    responses: list[dict[str, np.ndarray]] = []
    with grpc.InferenceServerClient(url) as client:
        client.start_stream(lambda result, error: answers.put((result, error)))
        client.async_stream_infer("llm", inputs, enable_empty_final_response=True, parameters=parameters)
        final = False
        while not final:
            result, error = answers.get(timeout=60)
            assert error is None, error
            response = result.get_response()
            final = response.parameters["triton_final_response"].bool_param
            responses.append({output.name: result.as_numpy(output.name) for output in response.outputs})
        client.stop_stream()
    return responses


def asked_with(url: str, inputs: list[grpc.InferInput]) -> str:
    return str(answered(url, inputs)[0]["text_output"][0].decode())


def test_tensors_of_tensorrt_llm_mean_what_parameters_mean(llm_modes_server: TritonServer) -> None:
    whole = ask(llm_modes_server.grpc, "llm", "abc", stream=False, sampling=GREEDY).text
    flat = tensors(text_input="abc", max_tokens=12, temperature=0.0, min_length=12, pad_id=0, random_seed=4)
    assert asked_with(llm_modes_server.grpc, flat) == whole
    stop = whole[-4:-1]
    cut = tensors(text_input="abc", max_tokens=12, temperature=0.0, stop_words=["never there", stop])
    until = ask(
        llm_modes_server.grpc, "llm", "abc", stream=False, sampling=GREEDY | {"ignore_eos": False, "stop": stop}
    )
    assert asked_with(llm_modes_server.grpc, cut) == until.text


def test_lists_get_through_generate(llm_modes_server: TritonServer) -> None:
    whole = generate(llm_modes_server.http, "llm", text_input="abc", **GREEDY)[1]["text_output"]
    stop = whole[-4:-1]
    for given in ([stop], stop, json.dumps([stop]), ["never there", stop]):
        status, answer = generate(llm_modes_server.http, "llm", text_input="abc", stop=given, **GREEDY)
        assert (status, answer["text_output"]) == (200, "abc" + whole[3:][: whole[3:].index(stop)]), given


def test_penalties_and_bans_change_the_answer_as_they_say(llm_modes_server: TritonServer) -> None:
    def answer(**more: Any) -> str:
        return ask(llm_modes_server.grpc, "llm", "abc", sampling=GREEDY | more).text

    plain = answer()
    assert plain == answer(presence_penalty=0, repetition_penalty=1, logit_bias={})
    first = next(letter for letter in plain if letter.isalnum())
    assert first not in answer(bad_words=[first])
    assert answer(bad_words=[first]) == answer(logit_bias={str(token): -100 for token in tokens_of(first)})
    assert set(answer(allowed_token_ids=tokens_of("xyz"))) <= set("xyz")
    assert answer(logit_bias={str(tokens_of("q")[0]): 100}) == "q" * 12
    often = answer(logit_bias={str(token): 30 for token in tokens_of("qr")}, frequency_penalty=2)
    assert {"q", "r"} <= set(often), "what was said often gives way"


def tokens_of(letters: str) -> list[int]:
    return [vocabulary()[letter] for letter in letters]


def test_an_answer_has_the_form_that_was_asked_for_to_its_last_character(llm_modes_server: TritonServer) -> None:
    schema = {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}},
        "required": ["ok"],
        "additionalProperties": False,
    }
    for seed in range(3):
        sampling = {"seed": seed, "max_tokens": 60, "guided_regex": "[a-z]{4}!"}
        answer = ask(llm_modes_server.grpc, "llm", "abc", sampling=sampling, return_finish_reason=True)
        assert re.fullmatch("[a-z]{4}!", answer.text)
        assert answer.outputs[-1]["finish_reason"] == b"stop"
    sampling = {"temperature": 0, "max_tokens": 60, "structured_outputs": {"json": schema}}
    assert json.loads(ask(llm_modes_server.grpc, "llm", "abc", sampling=sampling).text).keys() == {"ok"}
    status, answered = generate(llm_modes_server.http, "llm", text_input="abc", guided_choice='["left", "right"]')
    assert (status, answered["text_output"] in ("abcleft", "abcright")) == (200, True)
    status, answered = generate(llm_modes_server.http, "llm", text_input="abc", guided_regex="[a-")
    assert status == 400
    assert answered["error"].startswith("structured_outputs.regex is '[a-': ")


def test_a_prompt_may_be_cut_to_its_end(llm_modes_server: TritonServer) -> None:
    sampling = GREEDY | {"truncate_prompt_tokens": 3}
    cut = ask(llm_modes_server.grpc, "llm", "xyzabc", sampling=sampling, return_num_input_tokens=True)
    assert cut.text == ask(llm_modes_server.grpc, "llm", "abc", sampling=GREEDY).text
    assert cut.outputs[0]["num_input_tokens"] == 3


def test_who_is_not_done_in_time_hears_of_it(llm_modes_server: TritonServer) -> None:
    hasty = {"max_tokens": 10**6, "ignore_eos": True, "max_time": 0.3}
    answer = Stream(llm_modes_server.grpc, "llm", "a", stream=True, sampling=hasty).wait()
    assert answer.chunks
    assert answer.error
    assert "max_time is 0.3" in answer.error


@pytest.mark.parametrize(
    "payload",
    [
        # genai-perf --backend vllm, perf_analyzer in Triton's own tests, genai-perf --backend tensorrtllm
        {"exclude_input_in_output": True, "sampling_parameters": '{"max_tokens": "8", "min_tokens": "8"}'},
        {"sampling_parameters": '{"max_tokens": 8, "ignore_eos": true}'},
        {"exclude_input_in_output": True, "max_tokens": 8, "min_length": 8},
    ],
    ids=["genai-perf-vllm", "perf-analyzer", "genai-perf-tensorrtllm"],
)
def test_payloads_of_load_tools_are_taken(llm_modes_server: TritonServer, payload: dict[str, Any]) -> None:
    """Made as those tools make them; the tools themselves are not on PyPI any more, where perf_analyzer is empty."""
    inputs = tensors(text_input="abc", stream=True, **payload)
    answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
    with grpc.InferenceServerClient(llm_modes_server.grpc) as client:
        client.start_stream(lambda result, error: answers.put((result, error)))
        client.async_stream_infer("llm", inputs, enable_empty_final_response=True)
        texts, final = [], False
        while not final:
            result, error = answers.get(timeout=60)
            assert error is None, error
            final = result.get_response().parameters["triton_final_response"].bool_param
            texts += [] if result.as_numpy("text_output") is None else [result.as_numpy("text_output")[0]]
        client.stop_stream()
    assert 1 <= len(texts) <= 8


@pytest.mark.parametrize(
    "more",
    [
        {"max_tokens": 12},
        {"max_tokens": 12, "logprobs": False, "n": 1, "frequency_penalty": 0.0, "presence_penalty": 0.0, "seed": -5},
        {"max_tokens": 12, "logit_bias": {"65": -100}, "stop": ["never there"], "min_tokens": 1, "ignore_eos": False},
    ],
    ids=["least", "older", "most"],
)
@pytest.mark.parametrize("stream", [False, True])
def test_requests_of_tritons_openai_frontend_are_taken(
    llm_modes_server: TritonServer, stream: bool, more: dict[str, Any]
) -> None:
    """Made as its python/openai makes them for the backend `vllm`: one-dimensional tensors, all options as JSON."""
    wanted = tensors(
        text_input="abc",
        stream=stream,
        exclude_input_in_output=True,
        sampling_parameters=json.dumps({"temperature": 0.0, "top_p": 1.0} | more),
        return_num_input_tokens=True,
        return_num_output_tokens=True,
        return_logprobs=False,
    )
    responses = answered(llm_modes_server.grpc, wanted)
    plain = ask(llm_modes_server.grpc, "llm", "abc", sampling={"temperature": 0, "max_tokens": 12})
    if "logit_bias" not in more:
        assert b"".join(part["text_output"][0] for part in responses if part).decode() == plain.text
    usage = [(int(part["num_input_tokens"][0]), int(part["num_output_tokens"][0])) for part in responses if part]
    assert all(prompt == 3 for prompt, _ in usage)
    assert 1 <= sum(output for _, output in usage) <= 12


def test_a_parameter_may_come_in_every_way_at_once(llm_modes_server: TritonServer) -> None:
    plain = ask(llm_modes_server.grpc, "llm", "abc", sampling=GREEDY).text
    inputs = tensors(text_input="abc", sampling_parameters=json.dumps(GREEDY), temperature=0.0, max_tokens=12)
    (whole, *_) = answered(llm_modes_server.grpc, inputs, parameters={"temperature": "0", "max_tokens": 12})
    assert whole["text_output"][0].decode() == "abc" + plain


def several(url: str, stream: bool, **asked: Any) -> list[dict[str, np.ndarray]]:
    sampling = json.dumps({"max_tokens": 20, "ignore_eos": True, "seed": 3, "n": 3} | asked)
    wanted = tensors(text_input="abc", stream=stream, exclude_input_in_output=True, sampling_parameters=sampling)
    return answered(url, wanted + tensors(return_finish_reason=True, return_num_output_tokens=True))


def test_several_answers_to_one_prompt_come_side_by_side(llm_modes_server: TritonServer) -> None:
    alone = [
        ask(llm_modes_server.grpc, "llm", "abc", sampling={"max_tokens": 20, "ignore_eos": True, "seed": seed}).text
        for seed in (3, 4, 5)
    ]
    (whole,) = several(llm_modes_server.grpc, stream=False)
    assert [text.decode() for text in whole["text_output"]] == alone
    assert whole["finish_reason"].tolist() == [b"length"] * 3
    assert whole["num_output_tokens"].tolist() == [20] * 3
    parts = several(llm_modes_server.grpc, stream=True)
    assert all(part["text_output"].shape == (3,) for part in parts)
    assert ["".join(part["text_output"][index].decode() for part in parts) for index in range(3)] == alone
    assert np.sum([part["num_output_tokens"] for part in parts], axis=0).tolist() == [20] * 3
    assert parts[-1]["finish_reason"].tolist() == [b"length"] * 3
