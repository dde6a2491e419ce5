"""The language model's other three policies, as their config.pbtxt stand, on a real tritonserver."""

import concurrent.futures
import queue
import re
import time
from typing import Any

import pytest
import tritonclient.grpc as grpc

from tests.server.llm_client import Answer, Stream, ask, generate, inputs
from tests.server.tritonserver import ROOT, TritonServer

MODES = ("llm_unbatched", "llm_static", "llm_dynamic")


@pytest.fixture
def server(llm_modes_server: TritonServer) -> TritonServer:
    return llm_modes_server


def start(server: TritonServer, mode: str, tokens: int, text: str = "once", **more: Any) -> Stream:
    sampling = {"temperature": 0, "max_tokens": tokens, "ignore_eos": True}
    return Stream(server.grpc, mode, text, sampling=sampling, stream=True, batched=mode != "llm", **more)


def batches(server: TritonServer, mode: str) -> tuple[int, int]:
    """(requests executed, batches executed), once they stand still."""
    with grpc.InferenceServerClient(server.grpc) as client:

        def counts() -> tuple[int, int]:
            stats = client.get_inference_statistics(mode, as_json=True)["model_stats"][0]
            return int(stats.get("inference_count", 0)), int(stats.get("execution_count", 0))

        now, before = counts(), (-1, -1)
        while now != before:
            time.sleep(0.3)
            now, before = counts(), now
        return now


class Batches:
    """What Triton made of the requests that came meanwhile."""

    def __init__(self, server: TritonServer, mode: str) -> None:
        self._server, self._mode = server, mode
        self._before = batches(server, mode)

    def since(self) -> tuple[int, int]:
        requests, executed = batches(self._server, self._mode)
        return requests - self._before[0], executed - self._before[1]


@pytest.mark.parametrize("mode", MODES)
def test_says_what_the_continuous_model_says(server: TritonServer, mode: str) -> None:
    asked = [(f"{number} little", 3 + 5 * number) for number in range(16)]  # a full bus, for static's sake
    wanted = [start(server, "llm", tokens, text).wait() for text, tokens in asked]
    streams = [start(server, mode, tokens, text) for text, tokens in asked]
    answers = [stream.wait() for stream in streams]
    assert [answer.text for answer in answers] == [answer.text for answer in wanted]
    assert [answer.finals for answer in answers] == [1] * len(asked)
    assert not any(answer.error for answer in answers)


@pytest.mark.parametrize("mode", ["llm_unbatched", "llm_dynamic"])
def test_http_requests_are_the_same_for_every_model(server: TritonServer, mode: str) -> None:
    body = {"text_input": "once", "max_tokens": 5, "temperature": 0, "return_num_output_tokens": True}
    status, answer = generate(server.http, mode, **body)
    expected = generate(server.http, "llm", **body)[1] | {"model_name": mode}
    assert (status, answer) == (200, expected)


def test_outputs_have_a_batch_dimension(server: TritonServer) -> None:
    with grpc.InferenceServerClient(server.grpc) as client:
        results: queue.SimpleQueue[Any] = queue.SimpleQueue()
        client.start_stream(lambda result, error: results.put((result, error)))
        made = inputs("once", sampling={"max_tokens": 2}, batched=True, return_num_output_tokens=True)
        client.async_stream_infer("llm_dynamic", made)
        result, error = results.get(timeout=30)
        client.stop_stream()
    assert error is None
    assert result.as_numpy("text_output").shape == (1, 1)
    assert result.as_numpy("num_output_tokens").tolist() == [[2]]


class TestDynamic:
    def test_leaves_when_full_without_waiting_for_the_timer(self, server: TritonServer) -> None:
        made = Batches(server, "llm_dynamic")
        for stream in [start(server, "llm_dynamic", 4) for _ in range(32)]:
            stream.wait()
        requests, executed = made.since()
        assert requests == 32
        # The first of them may have left before the second was sent: the bus was free, and the timer is for the rest.
        assert executed <= 4

    def test_leaves_when_the_timer_rings(self, server: TritonServer) -> None:
        began = time.monotonic()
        answer = start(server, "llm_dynamic", 1).wait_for_chunks(1)
        assert time.monotonic() - began >= 0.1
        answer.wait()

    def test_who_is_done_early_is_answered_early_and_who_comes_late_waits(self, server: TritonServer) -> None:
        long, short = start(server, "llm_dynamic", 1500, "long"), start(server, "llm_dynamic", 2, "short")
        assert short.wait().finals == 1
        late = start(server, "llm_dynamic", 1, "late")
        long.wait_for_chunks(20)
        assert not long.answer.finals, "the long one must outlast the short one, or this shows nothing"
        assert not late.answer.chunks
        began = time.monotonic()
        late.wait_for_chunks(1)
        waited = time.monotonic() - began
        long.wait()
        assert late.wait().finals == 1
        assert waited > 0.1, "the free seat was taken while the bus was under way"

    def test_nobody_waits_for_a_passenger_who_left(self, server: TritonServer) -> None:
        endless, short = start(server, "llm_dynamic", 3500, "endless"), start(server, "llm_dynamic", 2, "short")
        short.wait()
        endless.cancel()
        began = time.monotonic()
        assert start(server, "llm_dynamic", 2).wait().finals == 1
        assert time.monotonic() - began < 5

    def test_a_bad_request_disturbs_nobody_on_the_bus(self, server: TritonServer) -> None:
        good = [start(server, "llm_dynamic", 4, f"{number}") for number in range(4)]
        bad = Stream(server.grpc, "llm_dynamic", "x", sampling={"top_p": 7}, stream=True, batched=True)
        assert "top_p is 7" in (bad.wait().error or "")
        assert [stream.wait().finals for stream in good] == [1] * 4

    def test_only_the_same_set_of_inputs_rides_together(self, server: TritonServer) -> None:
        """Triton's own rule, which the documentation tells: so send the same inputs with every request."""

        def executed(mixed: bool) -> int:
            blocker = start(server, "llm_dynamic", 400, "blocker")  # the others gather behind it
            blocker.wait_for_chunks(1)
            made = Batches(server, "llm_dynamic")
            streams = []
            for number in range(8):
                more: dict[str, Any] = {"return_finish_reason": True} if mixed and number % 2 else {}
                streams.append(start(server, "llm_dynamic", 2, **more))
            for stream in [blocker, *streams]:
                stream.wait()
            return made.since()[1]

        assert executed(mixed=False) <= 2
        # Each alone, unless two alike came one after the other: eight connections keep no order.
        assert executed(mixed=True) >= 5


class TestStatic:
    def test_fifteen_wait_for_a_sixteenth(self, server: TritonServer) -> None:
        made = Batches(server, "llm_static")
        first = [start(server, "llm_static", 3, f"{number}") for number in range(15)]
        time.sleep(1)
        assert made.since() == (0, 0)
        streams = [*first, start(server, "llm_static", 3, "the last")]
        assert [stream.wait().finals for stream in streams] == [1] * 16
        assert made.since() == (16, 1)

    def test_who_leaves_the_queue_frees_the_place(self, server: TritonServer) -> None:
        gone = start(server, "llm_static", 3)
        time.sleep(0.3)
        gone.cancel()
        time.sleep(0.3)
        streams = [start(server, "llm_static", 3, f"{number}") for number in range(16)]
        answers: list[Answer] = [stream.wait() for stream in streams]
        assert [answer.finals for answer in answers] == [1] * 16


class TestUnbatched:
    def test_one_after_the_other(self, server: TritonServer) -> None:
        made = Batches(server, "llm_unbatched")
        first = start(server, "llm_unbatched", 1500, "first").wait_for_chunks(1)
        second = start(server, "llm_unbatched", 1, "second")
        first.wait_for_chunks(200)
        assert not first.answer.finals
        assert not second.answer.chunks
        first.wait()
        second.wait()
        assert made.since() == (2, 2)

    def test_many_at_once_all_get_their_turn(self, server: TritonServer) -> None:
        def one(number: int) -> Answer:
            return ask(
                server.grpc, "llm_unbatched", f"{number}",
                sampling={"temperature": 0, "max_tokens": 3, "ignore_eos": True}, batched=True,
            )  # fmt: skip

        with concurrent.futures.ThreadPoolExecutor(24) as pool:
            answers = list(pool.map(one, range(24)))
        assert [answer.finals for answer in answers] == [1] * 24


def test_a_bus_with_more_places_than_seats_does_not_load(server: TritonServer) -> None:
    with grpc.InferenceServerClient(server.grpc) as client, pytest.raises(Exception, match="max_batch_size is 16"):
        client.load_model("seatless")


def test_a_request_of_two_prompts_is_told_to_be_two_requests(server: TritonServer) -> None:
    status, answer = generate(server.http, "llm_dynamic", text_input=["one", "two"], max_tokens=2)
    assert status == 400
    assert re.search(r"text_input", answer["error"])


def test_the_weights_are_shared_not_copied() -> None:
    files = [ROOT / "model_repository" / mode / "1" / "model.json" for mode in ("llm", *MODES)]
    assert len({file.read_text() for file in files}) == 1
