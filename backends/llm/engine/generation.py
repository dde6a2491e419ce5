"""The hand-over: the engine's loop puts tokens in, one consumer takes text out, neither waits for the other."""

import threading
from collections.abc import Callable
from dataclasses import dataclass

from engine.detokenizer import Detokenizer, StopStrings
from engine.errors import RequestError
from engine.sampler import Sampled
from engine.sequence import FinishReason, Sequence
from engine.tokenizer import Tokenizer


@dataclass(frozen=True)
class Delta:
    """What has come since the last one. The last has a finish reason."""

    text: str
    tokens: tuple[Sampled, ...]
    finish_reason: FinishReason | None = None
    error: RequestError | None = None  # set when the reason is `abort` or `error`


class Generation:
    """One answer on its way through the engine.

    What piled up between two calls of `drain` comes as one delta, so a slow consumer costs neither time nor, beyond
    the tokens themselves, memory. Text is made here, on the consumer's thread: the loop deals in token ids only.
    """

    def __init__(
        self,
        sequence: Sequence,
        tokenizer: Tokenizer,
        on_ready: Callable[["Generation"], None],
        on_stop: Callable[["Generation"], None],
        index: int = 0,
    ) -> None:
        """
        Args:
            on_ready: called, from the loop, when there is something to drain, once until it is drained.
            on_stop: called, from the consumer, when a stop string makes further tokens pointless.
            index: which of a request's answers this is.
        """
        self.sequence = sequence
        self.index = index
        self._on_ready = on_ready
        self._on_stop = on_stop
        self._lock = threading.Lock()
        self._announced = False
        self._pending: list[Sampled] = []
        self._end: tuple[FinishReason, RequestError | None] | None = None
        params = sequence.params
        skip_special = params.skip_special_tokens
        self._detokenizer = Detokenizer(tokenizer, sequence.prompt, skip_special=skip_special)
        self._stops = StopStrings(params.stop, include=params.include_stop_str_in_output)
        self._end_tokens = tokenizer.eos_token_ids | set(params.stop_token_ids)
        self._show_end_token = params.include_stop_str_in_output
        self._textless: list[Sampled] = []  # tokens that have shown no text yet
        self._num_output = 0
        self.finished = False  # the last delta was drained

    def put(self, token: Sampled, reason: FinishReason | None = None) -> None:
        """By the loop. With a reason it is the last token: both come at once, since the last may be no text."""
        with self._lock:
            self._pending.append(token)
            if reason:
                self._end = (reason, None)
        self._announce()

    def end(self, reason: FinishReason, error: RequestError | None = None) -> None:
        """By the loop: ended without a further token."""
        with self._lock:
            self._end = (reason, error)
        self._announce()

    def _announce(self) -> None:
        with self._lock:
            first, self._announced = not self._announced, True
        if first:
            self._on_ready(self)

    def drain(self) -> Delta | None:
        """By the consumer. None when there is nothing to tell yet, or nothing any more."""
        with self._lock:
            pending, self._pending = self._pending, []
            end, self._announced = self._end, False
        if self.finished:
            return None
        text = ""
        for index, token in enumerate(pending):
            self._textless.append(token)
            self._num_output += 1
            is_last = end is not None and end[0] is FinishReason.STOP and index == len(pending) - 1
            is_end_token = is_last and token.token in self._end_tokens
            if self._show_end_token or not is_end_token:
                text += self._push(token.token)
            if self._stops.stopped:
                self._on_stop(self)
                return self._last(text, FinishReason.STOP, None)
        if end is not None:
            if end[1] is None and not self._stops.stopped:
                text += self._stops.push(self._detokenizer.flush())
                stopped = self._stops.stopped
                return self._last(text + self._stops.flush(), FinishReason.STOP if stopped else end[0], None)
            return self._last(text, *end)
        if not text:
            return None
        return Delta(text, self._take_tokens())

    def _push(self, token: int) -> str:
        text = self._detokenizer.push([token])
        # A stop string can't end what min_tokens keeps going.
        if self._num_output < self.sequence.params.min_tokens:
            return self._stops.flush() + text
        return self._stops.push(text)

    def _last(self, text: str, reason: FinishReason, error: RequestError | None) -> Delta:
        self.finished = True
        return Delta(text, self._take_tokens(), reason, error)

    def _take_tokens(self) -> tuple[Sampled, ...]:
        tokens, self._textless = tuple(self._textless), []
        return tokens
