"""From the engine's deltas to Triton's responses: which are sent, with which tensors, and which is the last."""

import json
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils
from engine.errors import Cancelled, EngineFailure, InvalidRequest, QueueFull, TimedOut
from engine.generation import Delta
from engine.sampler import Sampled
from engine.sequence import FinishReason
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


@dataclass
class Choice:
    """What one of a request's answers has not sent yet, and what of it goes on from response to response."""

    text: str
    tokens: list[Sampled] = field(default_factory=list)
    cumulative_logprob: float = 0.0
    finish_reason: FinishReason | None = None

    def add(self, delta: Delta) -> None:
        self.text += delta.text
        self.tokens += delta.tokens
        self.cumulative_logprob += sum(token.logprob or 0.0 for token in delta.tokens)
        self.finish_reason = delta.finish_reason


class Reply:
    """One client's responses. Sends exactly one final response, whatever happens.

    The lock is for Triton: its final response frees what `is_cancelled` asks, and a question asked meanwhile, or later,
    would end the whole server with a segmentation fault (seen on 2.51.0).
    """

    def __init__(self, sender: Any, request: Request, tokenizer: Tokenizer, request_id: str, *, batched: bool) -> None:
        """`batched`: tensors go out as [1, n] instead of [n], for n answers."""
        self.request_id = request_id  # the client's own, for the log
        self._sender = sender
        self._request = request
        self._tokenizer = tokenizer
        self._batched = batched
        self._choices = [Choice(request.prefix) for _ in range(request.params.n)]
        self._lock = threading.Lock()
        self.closed = False  # the final response is out
        self.cancelled = False  # by its client, as far as Triton was asked

    def is_cancelled(self) -> bool:
        with self._lock:
            if not self.closed and self._sender.is_cancelled():
                self.cancelled = True
            return self.cancelled

    def send(self, deltas: Mapping[int, Delta]) -> None:
        """`deltas`: by the index of their answers. Streaming: at once. Otherwise all of it with the last one."""
        for index, delta in deltas.items():
            if delta.error:
                self.fail(delta.error)
                return
            self._choices[index].add(delta)
        done = all(choice.finish_reason for choice in self._choices)
        if self._request.stream or done:
            response = pb_utils.InferenceResponse(self._tensors())
            for choice in self._choices:
                choice.text, choice.tokens = "", []
            with self._lock:
                if not self.closed:
                    self.closed = done
                    self._sender.send(response, flags=_final() if self.closed else 0)

    def fail(self, error: Exception) -> None:
        """End with an error, if it has not ended yet."""
        with self._lock:
            if not self.closed:
                self.closed = True
                send_error(self._sender, error)

    def _tensors(self) -> list[Any]:
        returns, choices = self._request.returns, self._choices
        values = {"text_output": _strings(choice.text for choice in choices)}
        if "finish_reason" in returns:
            values["finish_reason"] = _strings(choice.finish_reason or "None" for choice in choices)
        if "cumulative_logprob" in returns:
            values["cumulative_logprob"] = np.array([choice.cumulative_logprob for choice in choices], np.float32)
        if "logprobs" in returns:
            values["logprobs"] = _strings(json.dumps(self._logprobs(choice)) for choice in choices)
        if "num_input_tokens" in returns:
            values["num_input_tokens"] = np.array([len(self._request.prompt)], np.uint32)
        if "num_output_tokens" in returns:
            values["num_output_tokens"] = np.array([len(choice.tokens) for choice in choices], np.uint32)
        return [pb_utils.Tensor(name, value[None] if self._batched else value) for name, value in values.items()]

    def _logprobs(self, choice: Choice) -> list[dict[int, dict[str, Any]]] | None:
        """For each new token: itself and the likeliest ones, by token id."""
        if not self._request.show_logprobs:
            return None
        return [self._logprob(token) for token in choice.tokens]

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


def _strings(texts: Iterable[str]) -> np.ndarray:
    return np.array([text.encode("utf-8") for text in texts], dtype=np.object_)
