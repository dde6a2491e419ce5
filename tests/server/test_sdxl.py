"""The SDXL backend in a real tritonserver, over HTTP and gRPC, on random models made for the test."""

import base64
import io
import json
import random
import re
import shutil
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
from numpy.typing import NDArray
from PIL import Image
from tritonclient.utils import InferenceServerException

from tests.sdxl import tiny
from tests.server.tritonserver import ROOT, TritonServer

SIDE = 16  # pixels of the model `sdxl` here


def add_model(repository: Path, name: str, settings: dict[str, Any], queue: int | None = None) -> None:
    """A model with the config.pbtxt of this repository's `sdxl` and another model.json."""
    folder = repository / name
    shutil.copytree(ROOT / "model_repository" / "sdxl", folder)
    (folder / "1" / "model.json").write_text(json.dumps(settings))
    if queue is not None:
        config = (folder / "config.pbtxt").read_text()
        changed = re.sub(r"max_queue_size: \d+", f"max_queue_size: {queue}", config)
        changed = re.sub(r"max_batch_size: \d+", "max_batch_size: 1", changed)
        changed = re.sub(r"preferred_batch_size: \[\d+\]", "preferred_batch_size: [1]", changed)
        assert changed != config
        (folder / "config.pbtxt").write_text(changed)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    root = tmp_path_factory.mktemp("sdxl")
    tiny.write(root / "models" / "one")
    tiny.write(root / "models" / "two", sample_size=12, seed=1)
    repository = root / "repository"
    one = {"model": "../models/one", "num_threads": 1}
    add_model(repository, "sdxl", one)
    add_model(repository, "exact", one | {"mode": "exact"})
    add_model(repository, "short_queue", one, queue=2)
    add_model(repository, "other", {"model": "../models/two", "scheduler": "ddim", "steps": 3, "num_threads": 1})
    with TritonServer(root / "log", repository=repository, ready_timeout=300) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: TritonServer) -> Iterator[Any]:
    with grpcclient.InferenceServerClient(server.grpc) as client:
        yield client


def text(kind: Any, name: str, *values: str) -> Any:
    tensor = kind.InferInput(name, [len(values), 1], "BYTES")
    tensor.set_data_from_numpy(np.array([[value.encode()] for value in values], dtype=np.object_))
    return tensor


def submit(client: Any, requests: list[dict[str, Any]], model: str = "sdxl") -> list[Any]:
    """Sends all at once; a result or an InferenceServerException for each, in their order."""
    answers: dict[int, Any] = {}
    done = threading.Semaphore(0)

    def receive(result: Any, error: Any, i: int) -> None:
        answers[i] = error if error is not None else result
        done.release()

    for i, request in enumerate(requests):
        given = dict(request)
        inputs = [text(grpcclient, "prompt", given.pop("prompt", "a cat"))]
        if "negative_input" in given:
            inputs.append(text(grpcclient, "negative_prompt", given.pop("negative_input")))
        client.async_infer(model, inputs, lambda result, error, i=i: receive(result, error, i), parameters=given)
    for _ in requests:
        assert done.acquire(timeout=60), "a request was never answered"
    return [answers[i] for i in range(len(requests))]


def pixels(result: Any) -> NDArray[np.uint8]:
    assert not isinstance(result, Exception), result
    return np.asarray(Image.open(io.BytesIO(result.as_numpy("image")[0, 0])))


def statistics(client: Any, model: str = "sdxl") -> dict[str, int]:
    stats = client.get_inference_statistics(model, as_json=True)["model_stats"][0]
    queue = stats["inference_stats"]["queue"]
    return {
        "executions": int(stats.get("execution_count", 0)),
        "inferences": int(stats.get("inference_count", 0)),
        "queue_ns": int(queue.get("ns", 0)),
    }


def settled(client: Any) -> dict[str, int]:
    """The statistics, once what was answered before is counted: an answer leaves first."""
    found = statistics(client)
    while True:
        time.sleep(0.3)
        if (again := statistics(client)) == found:
            return found
        found = again


def since(before: dict[str, int], client: Any, inferences: int) -> dict[str, int]:
    """What came to the statistics of `sdxl`. Answers leave before their batch ends, and Triton counts it at the end."""
    deadline = time.monotonic() + 20
    while True:
        grown = {name: value - before[name] for name, value in statistics(client).items()}
        if grown["inferences"] >= inferences or time.monotonic() > deadline:
            return grown
        time.sleep(0.02)


def mixed(count: int, seed: int) -> list[dict[str, Any]]:
    rng = random.Random(seed)
    return [
        {
            "prompt": rng.choice(["a cat", "a dog", "a house"]) + f" number {i}",
            "seed": rng.randrange(10**6),
            "steps": rng.randint(2, 9),
            "guidance_scale": rng.uniform(1.5, 8),
            "scheduler": rng.choice(["euler", "euler_a", "dpm++_2m", "ddim"]),
            "negative_prompt": rng.choice(["", "a bird"]),
        }
        for i in range(count)
    ]


def test_sixteen_unlike_requests_run_as_one_batch_and_draw_what_they_draw_alone(client: Any) -> None:
    requests = mixed(16, seed=1)
    alone = [pixels(submit(client, [request])[0]) for request in requests]
    before = settled(client)
    together = [pixels(result) for result in submit(client, requests)]
    grown = since(before, client, 16)
    assert (grown["executions"], grown["inferences"]) == (1, 16)
    for one, same in zip(alone, together, strict=True):
        assert np.abs(one.astype(int) - same).max() <= 2
    assert len({picture.tobytes() for picture in together}) == 16


def test_exact_mode_gives_the_same_bytes_alone_and_in_a_batch(client: Any) -> None:
    requests = mixed(5, seed=2)
    alone = [submit(client, [request], "exact")[0].as_numpy("image")[0, 0] for request in requests]
    together = [result.as_numpy("image")[0, 0] for result in submit(client, requests[::-1], "exact")][::-1]
    assert alone == together


def test_the_timer_lets_a_lone_request_go_after_100_ms(client: Any) -> None:
    before = settled(client)
    submit(client, [{"steps": 1}])
    waited = since(before, client, 1)["queue_ns"] / 1e6
    assert 95 <= waited < 400


def test_sixteen_at_once_do_not_wait_for_the_timer(client: Any) -> None:
    before = settled(client)
    submit(client, [{"steps": 1, "seed": i} for i in range(16)])
    after = since(before, client, 16)
    assert after["executions"] == 1
    assert after["queue_ns"] / 16 / 1e6 < 60


def test_a_negative_prompt_as_an_input_cuts_batches_and_as_a_parameter_does_not(client: Any) -> None:
    before = settled(client)
    submit(client, [{"steps": 1, **({"negative_prompt": "x"} if i % 2 else {})} for i in range(8)])
    assert since(before, client, 8)["executions"] == 1
    before = settled(client)
    submit(client, [{"steps": 1, **({"negative_input": "x"} if i % 2 else {})} for i in range(8)])
    assert since(before, client, 8)["executions"] > 1


def test_one_bad_request_does_not_fail_its_batch(client: Any) -> None:
    requests: list[dict[str, Any]] = [{"seed": i, "steps": 2} for i in range(6)]
    requests[2]["steps"] = 0
    requests[4]["size"] = 5
    before = settled(client)
    answers = submit(client, requests)
    assert since(before, client, 6)["executions"] == 1
    assert "steps is 0; allowed: an integer from 1 to 100" in str(answers[2])
    assert "parameter 'size'" in str(answers[4])
    assert answers[2].status() == "StatusCode.INVALID_ARGUMENT"
    for i in (0, 1, 3, 5):
        assert pixels(answers[i]).shape == (SIDE, SIDE, 3)


def test_few_steps_are_answered_before_the_batch_ends(client: Any) -> None:
    ended: dict[int, float] = {}
    done = threading.Semaphore(0)

    def receive(steps: int, error: Any) -> None:
        assert error is None
        ended[steps] = time.monotonic()
        done.release()

    before = settled(client)
    began = time.monotonic()
    for steps in (100, 2):
        client.async_infer(
            "sdxl", [text(grpcclient, "prompt", "a cat")], lambda result, error, s=steps: receive(s, error),
            parameters={"steps": steps},
        )  # fmt: skip
    for _ in range(2):
        assert done.acquire(timeout=60)
    assert since(before, client, 2)["executions"] == 1
    assert ended[2] - began < (ended[100] - began) / 2


def counter(server: TritonServer, name: str, model: str = "sdxl") -> float:
    pattern = rf'^{re.escape(name)}{{[^}}]*model="{model}"[^}}]*}} (\S+)$'
    found = re.search(pattern, server.metric_text(), re.MULTILINE)
    assert found, f"{name} is not on the metrics page"
    return float(found[1])


def test_a_cancelled_request_leaves_the_batch(server: TritonServer, client: Any) -> None:
    failed, steps = (counter(server, name) for name in ("sdxl:failures_total", "sdxl:picture_steps_total"))
    call = client.async_infer(
        "sdxl", [text(grpcclient, "prompt", "a cat")], lambda result, error: None, parameters={"steps": 100}
    )
    deadline = time.monotonic() + 20
    while counter(server, "sdxl:picture_steps_total") == steps and time.monotonic() < deadline:
        time.sleep(0.01)
    call.cancel()
    while counter(server, "sdxl:failures_total") == failed and time.monotonic() < deadline:
        time.sleep(0.05)
    assert counter(server, "sdxl:failures_total") == failed + 1
    assert counter(server, "sdxl:picture_steps_total") < steps + 100


def test_a_request_whose_time_is_over_is_told_so(client: Any) -> None:
    with pytest.raises(
        InferenceServerException, match="not done within the request's timeout of 150000 micro"
    ) as caught:
        client.infer("sdxl", [text(grpcclient, "prompt", "a cat")], parameters={"steps": 100}, timeout=150_000)
    assert caught.value.status() == "StatusCode.UNAVAILABLE"
    # Not even the queue lets this one through.
    with pytest.raises(InferenceServerException, match="Request timeout expired"):
        client.infer("sdxl", [text(grpcclient, "prompt", "a cat")], timeout=1000)


def test_a_full_queue_is_refused_and_the_rest_is_served(client: Any) -> None:
    answers = submit(client, [{"steps": 60, "seed": i} for i in range(10)], "short_queue")
    refused = [answer for answer in answers if isinstance(answer, InferenceServerException)]
    assert 1 <= len(refused) <= 8
    assert {answer.status() for answer in refused} == {"StatusCode.UNAVAILABLE"}
    assert all("Exceeds maximum queue size" in str(answer) for answer in refused)
    assert all(pixels(answer).shape for answer in answers if answer not in refused)


def generate(server: TritonServer, **body: Any) -> tuple[int, dict[str, Any]]:
    url = f"http://{server.http}/v2/models/sdxl/generate"
    try:
        with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode()), timeout=60) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def test_generate_answers_with_base64(server: TritonServer, client: Any) -> None:
    status, answer = generate(server, prompt="a cat", encoding="base64", seed=5, steps=3, guidance_scale=2.5)
    assert (status, answer["seed"]) == (200, 5)
    assert "generated_image" not in answer
    image = Image.open(io.BytesIO(base64.b64decode(answer["image"])))
    request = {"prompt": "a cat", "seed": 5, "steps": 3, "guidance_scale": 2.5}
    assert np.abs(np.asarray(image).astype(int) - pixels(submit(client, [request])[0])).max() <= 2


def test_generate_says_what_is_wrong(server: TritonServer) -> None:
    status, answer = generate(server, prompt="a cat", parameters={"width": 17})
    assert status == 400
    assert answer["error"] == "width is 17; allowed: a multiple of 4 from 4 to 32"


def test_the_tutorials_client_is_understood(server: TritonServer) -> None:
    with httpclient.InferenceServerClient(server.http) as client:
        wanted = [httpclient.InferRequestedOutput("generated_image")]
        result = client.infer("sdxl", [text(httpclient, "prompt", "a cat", "a dog")], outputs=wanted)
        assert result.as_numpy("generated_image").shape == (2, SIDE, SIDE, 3)
        assert result.as_numpy("generated_image").dtype == np.uint8
        assert result.as_numpy("image") is None
        inputs = [text(httpclient, "prompt", "a cat"), text(httpclient, "negative_prompt", "a dog")]
        assert client.infer("sdxl", inputs, outputs=wanted).as_numpy("generated_image").shape == (1, SIDE, SIDE, 3)


def test_pixels_come_along_when_asked_for(client: Any) -> None:
    (result,) = submit(client, [{"generated_image": True, "seed": 3, "steps": 2}])
    assert np.array_equal(result.as_numpy("generated_image")[0], pixels(result))
    (without,) = submit(client, [{"seed": 3, "steps": 2}])
    assert without.as_numpy("generated_image") is None


def test_a_drawn_seed_is_told_and_draws_the_same_again(client: Any) -> None:
    (first,) = submit(client, [{"seed": -1, "steps": 2}])
    seed = int(first.as_numpy("seed")[0, 0])
    assert seed >= 0
    (again,) = submit(client, [{"seed": seed, "steps": 2}])
    assert np.array_equal(pixels(first), pixels(again))


def test_a_request_may_bring_a_full_batch(client: Any) -> None:
    prompts = [f"picture {i}" for i in range(16)]
    before = settled(client)
    result = client.infer("sdxl", [text(grpcclient, "prompt", *prompts)], parameters={"seed": 10, "steps": 2})
    assert since(before, client, 16)["executions"] == 1
    assert result.as_numpy("seed")[:, 0].tolist() == list(range(10, 26))
    (third,) = submit(client, [{"prompt": "picture 3", "seed": 13, "steps": 2}])
    batched = np.asarray(Image.open(io.BytesIO(result.as_numpy("image")[3, 0])))
    assert np.abs(batched.astype(int) - pixels(third)).max() <= 2


def test_another_size_and_scheduler_need_nothing_but_model_json(client: Any) -> None:
    (result,) = submit(client, [{"seed": 1}], "other")
    assert pixels(result).shape == (24, 24, 3)
    (named,) = submit(client, [{"seed": 1, "scheduler": "ddim", "steps": 3}], "other")
    assert np.array_equal(pixels(result), pixels(named))
    (euler,) = submit(client, [{"seed": 1, "scheduler": "euler", "steps": 3}], "other")
    assert not np.array_equal(pixels(result), pixels(euler))


def test_metrics_count_batches_steps_and_pictures(server: TritonServer, client: Any) -> None:
    names = ["sdxl:images_total", "sdxl:picture_steps_total", "sdxl:batch_size_sum", "sdxl:step_seconds_count"]
    before = [counter(server, name) for name in names]
    submit(client, [{"steps": steps, "seed": steps} for steps in (2, 2, 3)])
    grown = [counter(server, name) - old for name, old in zip(names, before, strict=True)]
    assert grown == [3, 7, 3, 3]


def test_a_wrong_model_json_is_told_at_start(tmp_path: Path) -> None:
    add_model(tmp_path / "repository", "sdxl", {"model": "owner/name", "stepz": 3})
    with pytest.raises(AssertionError, match=r"model.json: unknown key 'stepz' \(did you mean 'steps'\?\)"):
        TritonServer(tmp_path / "log", repository=tmp_path / "repository", ready_timeout=120).start()


def example(name: str, *args: str, typed: str = "") -> list[str]:
    """The lines that a program of client_examples/ prints."""
    command = [sys.executable, str(ROOT / "client_examples" / name), *args]
    done = subprocess.run(command, input=typed, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_txt2img_writes_a_picture_a_prompt_and_a_sheet(server: TritonServer, protocol: str, tmp_path: Path) -> None:
    url = server.grpc if protocol == "grpc" else server.http
    flags = ["--grpc"] if protocol == "grpc" else []
    sheet = tmp_path / "sheet.png"
    args = ["--url", url, "--seed=7", "--steps=2", "--guidance-scale=2.5", f"--output={tmp_path}", f"--sheet={sheet}"]
    written = [Path(line) for line in example("txt2img.py", *flags, *args, "a red circle", "a blue star")]
    assert written == [tmp_path / "7.png", tmp_path / "8.png", sheet]
    assert [Image.open(path).size for path in written] == [(SIDE, SIDE), (SIDE, SIDE), (2 * SIDE, SIDE)]


def test_txt2img_async_writes_every_picture(server: TritonServer, tmp_path: Path) -> None:
    prompts = "".join(f"picture {i}\n" for i in range(20))
    args = ["--url", server.grpc, "--steps=2", f"--output={tmp_path / 'out'}"]
    assert example("txt2img_async.py", *args, typed=prompts)[-1].startswith("20 pictures in ")
    assert [Image.open(path).size for path in (tmp_path / "out").glob("*.png")] == [(SIDE, SIDE)] * 20
