"""One question to an LLM on a server, the way each kind of client asks it."""

import json
import queue
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
import tritonclient.grpc as grpc


@dataclass
class Answer:
    """All responses to one request."""

    chunks: list[str] = field(default_factory=list)
    finals: int = 0
    error: str | None = None
    outputs: list[dict[str, Any]] = field(default_factory=list)  # of each response, by name

    @property
    def text(self) -> str:
        return "".join(self.chunks)


class Stream:
    """One gRPC stream with one request on it. Counts final responses; waits for whatever may come after the first."""

    def __init__(self, url: str, model: str, text: str | None = None, **asked: Any) -> None:
        """`asked`: tensors by name; `sampling` (a dict), `parameters` (request parameters) and `request_id` besides."""
        self.answer = Answer()
        self._events: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._client = grpc.InferenceServerClient(url)
        self._client.start_stream(lambda result, error: self._events.put((result, error)))
        parameters, request_id = asked.pop("parameters", None), asked.pop("request_id", "")
        self._client.async_stream_infer(
            model,
            inputs(text, **asked),
            enable_empty_final_response=True,
            parameters=parameters,
            request_id=request_id,
        )

    def wait_for_chunks(self, count: int, timeout: float = 60) -> Self:
        while len(self.answer.chunks) < count and not self.answer.finals and not self.answer.error:
            self._take(timeout)
        return self

    def wait(self, timeout: float = 120) -> Answer:
        """Until the final response, and a moment longer: nothing may follow it."""
        while not self.answer.finals and not self.answer.error:
            self._take(timeout)
        try:
            while True:
                self._take(0.05)
        except queue.Empty:
            pass
        self._client.stop_stream()
        self._client.close()
        return self.answer

    def cancel(self) -> None:
        self._client.stop_stream(cancel_requests=True)
        self._client.close()

    def _take(self, timeout: float) -> None:
        result, error = self._events.get(timeout=timeout)
        if error:
            self.answer.error = f"{error.status() or ''} {error.message()}".strip()
            return
        response = result.get_response()
        self.answer.finals += response.parameters["triton_final_response"].bool_param
        if response.outputs:
            outputs = {output.name: result.as_numpy(output.name).reshape(-1)[0] for output in response.outputs}
            self.answer.outputs.append(outputs)
            self.answer.chunks.append(outputs["text_output"].decode())


def inputs(
    text: str | None, *, sampling: dict[str, Any] | None = None, batched: bool = False, **tensors: Any
) -> list[grpc.InferInput]:
    """`batched`: with the batch dimension of a model that has a max_batch_size."""
    shape = [1, 1] if batched else [1]
    strings: dict[str, str | bytes | None] = {"text_input": text}
    if sampling is not None:
        strings["sampling_parameters"] = json.dumps(sampling)
    strings |= {name: value for name, value in tensors.items() if isinstance(value, str | bytes)}
    made = []
    for name, value in strings.items():
        if value is not None:
            data = value if isinstance(value, bytes) else value.encode()
            made.append(grpc.InferInput(name, shape, "BYTES"))
            made[-1].set_data_from_numpy(np.array([data], dtype=np.object_).reshape(shape))
    for name, value in tensors.items():
        if isinstance(value, bool):
            made.append(grpc.InferInput(name, shape, "BOOL"))
            made[-1].set_data_from_numpy(np.array([value]).reshape(shape))
    return made


def ask(url: str, model: str, text: str | None = None, **asked: Any) -> Answer:
    """Streamed over gRPC unless `stream=False` is given."""
    asked.setdefault("stream", True)
    return Stream(url, model, text, **asked).wait()


def generate(url: str, model: str, **body: Any) -> tuple[int, dict[str, Any]]:
    """POST .../generate: the HTTP status and the answer."""
    try:
        with urllib.request.urlopen(_post(url, model, "generate", body), timeout=120) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def generate_stream(url: str, model: str, **body: Any) -> Iterator[dict[str, Any]]:
    """POST .../generate_stream: each event as it comes. Closing the iterator closes the connection."""
    with urllib.request.urlopen(_post(url, model, "generate_stream", body), timeout=120) as response:
        for line in response:
            if line.startswith(b"data: "):
                yield json.loads(line[6:])


def _post(url: str, model: str, route: str, body: dict[str, Any]) -> urllib.request.Request:
    return urllib.request.Request(f"http://{url}/v2/models/{model}/{route}", json.dumps(body).encode())
