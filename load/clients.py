"""Clients that send one request at a time and note when each piece of its answer came. They run as greenlets.

All requests to an LLM send the same set of inputs: Triton cuts a batch where the set of optional inputs changes.
"""

import http.client
import json
import time
from dataclasses import dataclass, field
from typing import Any

import gevent
import gevent.queue
import numpy as np
import tritonclient.grpc
import tritonclient.http
from tritonclient.utils import InferenceServerException

from load.workload import Work

CONNECT_SECONDS = 10.0


class RequestFailed(Exception):
    """In the words of the server, or of the connection to it."""


@dataclass
class Answer:
    """Filled as it comes, so that a request which fails half-way keeps what it got."""

    stamps: list[float] = field(default_factory=list)  # by time.perf_counter()
    tokens: list[int] = field(default_factory=list)
    input_tokens: int | None = None
    size: int = 0  # bytes of text or picture

    def add(self, stamp: float, tokens: int, size: int) -> None:
        """A response that carries nothing, as the last one may, is no part of the answer."""
        if tokens or size:
            self.stamps.append(stamp)
            self.tokens.append(tokens)
            self.size += size


class Client:
    """One client per greenlet. `ask` returns when nothing more can come; RequestFailed says why nothing more will."""

    def ask(self, work: Work, answer: Answer, timeout: float) -> None:
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError


def takes_batches(protocol: str, host: str, model: str) -> bool:
    """Whether tensors have a batch dimension: those of models with a max_batch_size do. Raises RequestFailed."""
    try:
        if protocol == "grpc":
            client = tritonclient.grpc.InferenceServerClient(host)  # closes itself, see _close
            config = client.get_model_config(model, as_json=True, client_timeout=CONNECT_SECONDS)["config"]
        else:
            with tritonclient.http.InferenceServerClient(host, network_timeout=CONNECT_SECONDS) as client:
                config = client.get_model_config(model)
    except (InferenceServerException, OSError) as error:
        raise RequestFailed(f"{host}: {_reason(error)}") from error
    return int(config.get("max_batch_size", 0)) > 0


def _reason(error: Exception) -> str:
    return str(error.message() if isinstance(error, InferenceServerException) else error) or repr(error)


def _connected(kind: Any, host: str, **options: Any) -> Any:
    """A client of tritonclient.grpc or tritonclient.http that has its connection, so that no request waits for it."""
    client = kind.InferenceServerClient(host, **options)
    try:
        client.is_server_live()
    except (InferenceServerException, OSError) as error:
        raise RequestFailed(f"{host}: {_reason(error)}") from error
    return client


def _close(holder: Any) -> None:
    """Closes the client that `holder` keeps as `_client`, by dropping the last reference to it.

    Its close() would be called a second time when it is collected, and gRPC's count of open channels under gevent,
    which both calls lower, would make the process wait for ever on its way out.
    """
    del holder._client


def _tensor(kind: Any, name: str, value: str | bool, batched: bool) -> Any:
    """kind: tritonclient.grpc or tritonclient.http."""
    shape = [1, 1] if batched else [1]
    tensor = kind.InferInput(name, shape, "BOOL" if isinstance(value, bool) else "BYTES")
    array = np.array([value]) if isinstance(value, bool) else np.array([value.encode()], dtype=np.object_)
    tensor.set_data_from_numpy(array.reshape(shape))
    return tensor


def _llm_inputs(work: Work) -> dict[str, str | bool]:
    # Greedy and past the end token: every server and every mode computes the same tokens.
    sampling = {"temperature": 0, "max_tokens": work.max_tokens, "ignore_eos": True}
    return {
        "text_input": work.prompt,
        "stream": True,
        "sampling_parameters": json.dumps({name: value for name, value in sampling.items() if value is not None}),
        "return_num_input_tokens": True,
        "return_num_output_tokens": True,
    }


class LlmGrpcClient(Client):
    """Keeps one stream open and sends its requests over it, one after the other."""

    def __init__(self, host: str, model: str, batched: bool) -> None:
        self._model, self._batched = model, batched
        self._client = _connected(tritonclient.grpc, host)
        self._responses: gevent.queue.SimpleQueue | None = None  # of the stream, while it is open

    def ask(self, work: Work, answer: Answer, timeout: float) -> None:
        deadline = time.perf_counter() + timeout
        inputs = [_tensor(tritonclient.grpc, name, value, self._batched) for name, value in _llm_inputs(work).items()]
        try:
            responses = self._stream()
            self._client.async_stream_infer(self._model, inputs, enable_empty_final_response=True)
            final = False
            while not final:
                stamp, result, error = responses.get(timeout=max(0.001, deadline - time.perf_counter()))
                if error is not None:
                    raise error
                self._add(answer, stamp, result)
                final = result.get_response().parameters["triton_final_response"].bool_param
        except gevent.queue.Empty:
            self._end_stream()
            raise RequestFailed(f"no answer within {timeout:g} s") from None
        except InferenceServerException as error:
            self._end_stream()  # it may be broken, or have more to say of this request
            raise RequestFailed(_reason(error)) from error

    def _add(self, answer: Answer, stamp: float, result: Any) -> None:
        text, tokens = result.as_numpy("text_output"), result.as_numpy("num_output_tokens")
        if text is None:
            return
        size = len(text.reshape(-1)[0])
        # Servers that don't count send a token a response.
        answer.add(stamp, int(size > 0) if tokens is None else int(tokens.sum()), size)
        if answer.input_tokens is None and (count := result.as_numpy("num_input_tokens")) is not None:
            answer.input_tokens = int(count.reshape(-1)[0])

    def _stream(self) -> gevent.queue.SimpleQueue:
        if self._responses is None:
            # A queue of its own for each stream: what an earlier one still says is lost with it.
            responses = self._responses = gevent.queue.SimpleQueue()
            self._client.start_stream(lambda result, error: responses.put((time.perf_counter(), result, error)))
        return self._responses

    def _end_stream(self) -> None:
        self._responses = None
        self._client.stop_stream(cancel_requests=True)

    def close(self) -> None:
        self._end_stream()
        _close(self)


class LlmHttpClient(Client):
    """generate_stream: server-sent events, lines of `data: {...}`."""

    def __init__(self, host: str, model: str) -> None:
        self._connection = http.client.HTTPConnection(host)
        self._used = False
        self._path = f"/v2/models/{model}/generate_stream"

    def ask(self, work: Work, answer: Answer, timeout: float) -> None:
        try:
            with gevent.Timeout(timeout), self._post(json.dumps(_llm_inputs(work))) as response:
                for line in response:
                    self._add(answer, time.perf_counter(), line.decode().strip().removeprefix("data: "))
        except gevent.Timeout:
            self.close()
            raise RequestFailed(f"no answer within {timeout:g} s") from None
        except (OSError, http.client.HTTPException, ValueError) as error:
            self.close()
            raise RequestFailed(str(error) or repr(error)) from error
        except RequestFailed:
            self.close()  # with whatever else the server has to say of this request
            raise

    def _post(self, body: str) -> http.client.HTTPResponse:
        used, self._used = self._used, True
        try:
            self._connection.request("POST", self._path, body)
            return self._connection.getresponse()
        except ConnectionError:
            if not used:
                raise
            self._connection.close()  # the server had closed it, idle as it was
            self._used = False
            return self._post(body)

    def _add(self, answer: Answer, stamp: float, data: str) -> None:
        if not data:
            return
        event = json.loads(data)
        if "error" in event:
            raise RequestFailed(event["error"])
        size = len(event["text_output"].encode())
        answer.add(stamp, int(event.get("num_output_tokens", size > 0)), size)
        if answer.input_tokens is None and "num_input_tokens" in event:
            answer.input_tokens = int(event["num_input_tokens"])

    def close(self) -> None:
        self._connection.close()
        self._used = False


class SdxlClient(Client):
    def __init__(self, protocol: str, host: str, model: str, batched: bool, timeout: float) -> None:
        """timeout: the longest that any `ask` may be given."""
        self._kind: Any = tritonclient.grpc if protocol == "grpc" else tritonclient.http
        self._model, self._batched, self._is_grpc = model, batched, protocol == "grpc"
        options = {} if self._is_grpc else {"network_timeout": timeout}
        self._client = _connected(self._kind, host, **options)

    def ask(self, work: Work, answer: Answer, timeout: float) -> None:
        prompt = _tensor(self._kind, "prompt", work.prompt, self._batched)
        parameters = {name: value for name, value in (("seed", work.seed), ("steps", work.steps)) if value is not None}
        limit = {"client_timeout": timeout} if self._is_grpc else {}
        try:
            result = self._client.infer(self._model, [prompt], parameters=parameters, **limit)
        except (InferenceServerException, OSError) as error:
            raise RequestFailed(_reason(error)) from error
        answer.add(time.perf_counter(), 0, len(result.as_numpy("image").reshape(-1)[0]))

    def close(self) -> None:
        _close(self)
