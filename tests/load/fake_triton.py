"""A server that speaks Triton's protocols and answers after known delays, to check what the load tools measure.

Models: `llm` (tensors without a batch dimension), `llm_batched` (with one) and `sdxl`. Each request is answered at its
own pace, however many there are, but while the server stalls nothing leaves it.
"""

import contextlib
import json
import threading
import time
from collections.abc import Iterator
from concurrent import futures
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

import grpc  # type: ignore[import-untyped]
import numpy as np
from tritonclient.grpc import model_config_pb2, service_pb2, service_pb2_grpc
from tritonclient.utils import deserialize_bytes_tensor, serialize_byte_tensor

BATCHED = {"llm": False, "llm_batched": True, "sdxl": True}
LLM_INPUTS = {"text_input", "stream", "sampling_parameters", "return_num_input_tokens", "return_num_output_tokens"}


@dataclass(frozen=True)
class Pace:
    """In seconds."""

    first: float = 0.1  # from request to first token, or to the picture
    gap: float = 0.05  # between tokens
    stall: tuple[float, float] | None = None  # (begin, length), counted from the first request of all
    # Beginning of a prompt: the error that such a request gets after its first token.
    refuses: tuple[str, str] | None = None


@dataclass(frozen=True)
class Request:
    """What the server saw."""

    model: str
    prompt: str
    moment: float
    asked: dict[str, Any]


class FakeTriton:
    """`with FakeTriton(pace) as server:` listens on free ports: `server.grpc`, `server.http` and `server.metrics`."""

    def __init__(self, pace: Pace) -> None:
        self.pace = pace
        self.requests: list[Request] = []
        self._first_request: float | None = None
        self._lock = threading.Lock()
        self._executor = futures.ThreadPoolExecutor(300)
        self._grpc = grpc.server(self._executor)
        service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(_Grpc(self), self._grpc)
        self.grpc = f"127.0.0.1:{self._grpc.add_insecure_port('127.0.0.1:0')}"
        self._http = _HttpServer(self)
        self.http = self.metrics = f"127.0.0.1:{self._http.server_address[1]}"

    def __enter__(self) -> Self:
        self._grpc.start()
        threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._grpc.stop(0).wait()
        self._executor.shutdown()

    def answer(self, model: str, prompt: str, asked: dict[str, Any], tokens: int) -> Iterator[int]:
        """Numbers of the tokens, each at its time. Raises ValueError where the request is to fail."""
        moment = time.monotonic()
        with self._lock:
            if self._first_request is None:
                self._first_request = moment
            self.requests.append(Request(model, prompt, moment, asked))
        for number in range(tokens):
            due = moment + self.pace.first + number * self.pace.gap
            time.sleep(max(0.0, due - time.monotonic()))
            self._stall(self._first_request)
            if number and self.pace.refuses and prompt.startswith(self.pace.refuses[0]):
                raise ValueError(self.pace.refuses[1])
            yield number

    def _stall(self, first_request: float) -> None:
        if self.pace.stall:
            begin = first_request + self.pace.stall[0]
            end = begin + self.pace.stall[1]
            if begin <= time.monotonic() < end:
                time.sleep(end - time.monotonic())

    def page(self) -> str:
        count = len(self.requests)
        return "\n".join(
            [
                "# HELP nv_inference_count Number of inferences performed (does not include cached requests)",
                "# TYPE nv_inference_count counter",
                f'nv_inference_count{{model="llm",version="1"}} {count}',
                'nv_inference_count{model="other",version="1"} 1000',
                f'nv_inference_exec_count{{model="llm",version="1"}} {count / 2}',
                'vllm:kv_cache_usage_perc{model="llm",version="1"} 0.25',
                "nv_cpu_utilization 0.5",
            ]
        )


def _value(request: Any, name: str) -> Any:
    """One input of a gRPC request: text or truth."""
    names = [tensor.name for tensor in request.inputs]
    if name not in names:
        return None
    place = names.index(name)
    raw = request.raw_input_contents[place]
    if request.inputs[place].datatype == "BOOL":
        return bool(np.frombuffer(raw, np.bool_)[0])
    return deserialize_bytes_tensor(raw)[0].decode()


class _Grpc(service_pb2_grpc.GRPCInferenceServiceServicer):
    def __init__(self, fake: FakeTriton) -> None:
        self._fake = fake

    def ServerLive(self, request: Any, context: Any) -> Any:
        return service_pb2.ServerLiveResponse(live=True)

    def ModelConfig(self, request: Any, context: Any) -> Any:
        if request.name not in BATCHED:
            context.abort(grpc.StatusCode.NOT_FOUND, f"Request for unknown model: '{request.name}' is not found")
        size = 16 if BATCHED[request.name] else 0
        return service_pb2.ModelConfigResponse(config=model_config_pb2.ModelConfig(max_batch_size=size))

    def ModelInfer(self, request: Any, context: Any) -> Any:
        _check_shapes(request)
        parameters = {name: value.int64_param for name, value in request.parameters.items()}
        list(self._fake.answer(request.model_name, _value(request, "prompt"), parameters, 1))
        picture = np.array([[b"picture"]], dtype=np.object_)
        return _response(request.model_name, {"image": picture})

    def ModelStreamInfer(self, requests: Iterator[Any], context: Any) -> Iterator[Any]:
        for request in requests:
            with contextlib.suppress(ValueError):
                _check_shapes(request)
                yield from self._answer(request)

    def _answer(self, request: Any) -> Iterator[Any]:
        asked = {tensor.name: _value(request, tensor.name) for tensor in request.inputs}
        sampling = json.loads(asked["sampling_parameters"])
        shape = [1, 1] if BATCHED[request.model_name] else [1]
        numbers = self._fake.answer(request.model_name, asked["text_input"], asked, sampling["max_tokens"])
        try:
            for _ in numbers:
                values = {
                    "text_output": np.array([b" word"], dtype=np.object_).reshape(shape),
                    "num_output_tokens": np.array([1], np.uint32).reshape(shape),
                    "num_input_tokens": np.array([len(asked["text_input"].split())], np.uint32).reshape(shape),
                }
                yield service_pb2.ModelStreamInferResponse(infer_response=_response(request.model_name, values))
        except ValueError as error:
            yield service_pb2.ModelStreamInferResponse(error_message=str(error))
            return
        yield service_pb2.ModelStreamInferResponse(infer_response=_response(request.model_name, {}, final=True))


def _check_shapes(request: Any) -> None:
    expected = [1, 1] if BATCHED[request.model_name] else [1]
    shapes = {tensor.name: list(tensor.shape) for tensor in request.inputs}
    assert all(shape == expected for shape in shapes.values()), shapes


def _response(model: str, values: dict[str, np.ndarray], final: bool = False) -> Any:
    response = service_pb2.ModelInferResponse(model_name=model, model_version="1")
    response.parameters["triton_final_response"].bool_param = final
    for name, value in values.items():
        datatype = "BYTES" if value.dtype == np.object_ else "UINT32"
        response.outputs.add(name=name, datatype=datatype, shape=value.shape)
        raw = serialize_byte_tensor(value).item() if datatype == "BYTES" else value.tobytes()
        response.raw_output_contents.append(raw)
    return response


class _HttpServer(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 300

    def __init__(self, fake: FakeTriton) -> None:
        self.fake = fake
        super().__init__(("127.0.0.1", 0), _Http)


class _Http(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _HttpServer

    def do_GET(self) -> None:
        if self.path == "/metrics":
            self._send(200, self.server.fake.page().encode())
            return
        if self.path == "/v2/health/live":
            self._send(200, b"")
            return
        model = self.path.split("/")[3]
        if model in BATCHED:
            self._send(200, json.dumps({"max_batch_size": 16 if BATCHED[model] else 0}).encode())
        else:
            message = f"Request for unknown model: '{model}' is not found"
            self._send(400, json.dumps({"error": message}).encode())

    def do_POST(self) -> None:
        model, route = self.path.split("/")[3:5]
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if route == "infer":
            self._infer(model, body)
        else:
            self._generate_stream(model, json.loads(body))

    def _infer(self, model: str, body: bytes) -> None:
        size = int(self.headers.get("Inference-Header-Content-Length", len(body)))
        request = json.loads(body[:size])
        assert request["inputs"][0]["shape"] == [1, 1]
        prompt = deserialize_bytes_tensor(body[size:])[0].decode()
        list(self.server.fake.answer(model, prompt, request.get("parameters", {}), 1))
        image = {"name": "image", "datatype": "BYTES", "shape": [1, 1], "data": ["picture"]}
        self._send(200, json.dumps({"model_name": model, "outputs": [image]}).encode())

    def _generate_stream(self, model: str, asked: dict[str, Any]) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        tokens = json.loads(asked["sampling_parameters"])["max_tokens"]
        counts = {"num_output_tokens": 1, "num_input_tokens": len(asked["text_input"].split())}
        try:
            for _ in self.server.fake.answer(model, asked["text_input"], asked, tokens):
                self._event({"model_name": model, "text_output": " word", **counts})
        except ValueError as error:
            self._event({"error": str(error)})
        self.wfile.write(b"0\r\n\r\n")

    def _event(self, event: dict[str, Any]) -> None:
        data = f"data: {json.dumps(event)}\n\n".encode()
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        self.wfile.flush()

    def _send(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass
