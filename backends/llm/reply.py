"""From the engine's deltas to Triton's responses: which are sent, with which tensors, and which is the last."""

import json
import threading
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils
from engine.errors import Cancelled, EngineFailure, InvalidRequest, QueueFull, TimedOut
from engine.generation import Delta
from engine.sampler import Sampled
from engine.tokenizer import Tokenizer
from request import Request

# Names in pb_utils.TritonError.
STATUS: dict[type[Exception], str] = {
    InvalidRequest: "INVALID_ARG",
    QueueFull: "UNAVAILABLE",
    TimedOut: "UNAVAILABLE",  # Triton has no DEADLINE_EXCEEDED; its own queue's time limit ends in this one too
    Cancelled: "CANCELLED",
    EngineFailure: "INTERNAL",
}


class Reply:
    """One client's responses. Sends exactly one final response, whatever happens.

    The lock is for Triton: its final response frees what `is_cancelled` asks, and a question asked meanwhile, or later,
    would end the whole server with a segmentation fault (seen on 2.51.0).
    """

    def __init__(self, sender: Any, request: Request, tokenizer: Tokenizer, *, batched: bool) -> None:
        """`batched`: tensors go out as [1, n] instead of [n]."""
        self._sender = sender
        self._request = request
        self._tokenizer = tokenizer
        self._batched = batched
        self._text = request.prefix
        self._tokens: list[Sampled] = []
        self._cumulative_logprob = 0.0
        self._lock = threading.Lock()
        self.closed = False  # the final response is out

    def is_cancelled(self) -> bool:
        with self._lock:
            return not self.closed and bool(self._sender.is_cancelled())

    def send(self, delta: Delta) -> None:
        """Streaming: at once. Otherwise all of it with the last delta."""
        if delta.error:
            self.fail(delta.error)
            return
        self._text += delta.text
        self._tokens += delta.tokens
        if self._request.stream or delta.finish_reason:
            response = pb_utils.InferenceResponse(self._tensors(delta))
            self._text, self._tokens = "", []
            with self._lock:
                if not self.closed:
                    self.closed = delta.finish_reason is not None
                    self._sender.send(response, flags=_final() if self.closed else 0)

    def fail(self, error: Exception) -> None:
        """End with an error, if it has not ended yet."""
        with self._lock:
            if not self.closed:
                self.closed = True
                send_error(self._sender, error)

    def _tensors(self, delta: Delta) -> list[Any]:
        returns = self._request.returns
        self._cumulative_logprob += sum(token.logprob or 0.0 for token in self._tokens)
        values = {"text_output": _string(self._text)}
        if "finish_reason" in returns:
            values["finish_reason"] = _string(delta.finish_reason or "None")
        if "cumulative_logprob" in returns:
            values["cumulative_logprob"] = np.array([self._cumulative_logprob], np.float32)
        if "logprobs" in returns:
            values["logprobs"] = _string(json.dumps(self._logprobs()))
        if "num_input_tokens" in returns:
            values["num_input_tokens"] = np.array([len(self._request.prompt)], np.uint32)
        if "num_output_tokens" in returns:
            values["num_output_tokens"] = np.array([len(self._tokens)], np.uint32)
        return [pb_utils.Tensor(name, value[None] if self._batched else value) for name, value in values.items()]

    def _logprobs(self) -> list[dict[int, dict[str, Any]]] | None:
        """For each new token: itself and the likeliest ones, by token id."""
        if not self._request.show_logprobs:
            return None
        return [self._logprob(token) for token in self._tokens]

    def _logprob(self, sampled: Sampled) -> dict[int, dict[str, Any]]:
        ranked = [(token, logprob, rank) for rank, (token, logprob) in enumerate(sampled.top, start=1)]
        if sampled.token not in {token for token, _, _ in ranked} and sampled.logprob is not None and sampled.rank:
            ranked.append((sampled.token, sampled.logprob, sampled.rank))
        return {
            token: {
                "logprob": logprob,
                "rank": rank,
                "decoded_token": self._tokenizer.decode([token], skip_special=False),
            }
            for token, logprob, rank in ranked
        }


def send_error(sender: Any, error: Exception) -> None:
    """The final response of a request that failed."""
    status = getattr(pb_utils.TritonError, STATUS.get(type(error), "INTERNAL"))
    response = pb_utils.InferenceResponse(error=pb_utils.TritonError(str(error) or repr(error), status))
    sender.send(response, flags=_final())


def _final() -> int:
    flag: int = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
    return flag


def _string(text: str) -> np.ndarray:
    return np.array([text.encode("utf-8")], dtype=np.object_)
