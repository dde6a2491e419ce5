"""Triton's requests to the engine, the engine's text to Triton's responses. The engine knows nothing of Triton.

accept() --> Engine.submit --> the engine's loop --> Generation --> sender thread --> response sender
                  ^                                                 watcher thread: has a client left?
"""

import contextlib
import faulthandler
import logging
import queue
import threading
import time
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils
from engine.config import EngineConfig
from engine.engine import Engine
from engine.errors import RequestError
from engine.generation import Generation
from engine.loader import load_engine
from metrics import Metrics
from reply import Reply, send_error
from request import read_request

# How soon a client's leaving is noticed. A step on a CPU takes longer than this, so it is at the latest at the next.
WATCH_SECONDS = 0.02
CLOSE_SECONDS = 15
log = logging.getLogger("requests")


class Adapter:
    def __init__(
        self, config: EngineConfig, labels: dict[str, str], *, batched: bool, reports_metrics: bool = True
    ) -> None:
        """
        Args:
            labels: of the model's metrics.
            batched: tensors have a batch dimension.
            reports_metrics: on Triton's metrics page.

        Raises:
            ConfigError: the model can't be loaded.
        """
        self._engine: Engine = load_engine(config)
        self._metrics = Metrics(lambda: self._engine.stats, labels) if reports_metrics else None
        self._replies: dict[Reply, list[Generation]] = {}  # all that have had no final response
        self._batched = batched
        self._lock = threading.Lock()
        self._idle = threading.Condition(self._lock)  # notified when the last reply is forgotten
        self._ready: queue.SimpleQueue[tuple[Reply, Generation] | None] = queue.SimpleQueue()
        self._closing = threading.Event()
        self._threads = [
            threading.Thread(target=self._send, name="llm-sender", daemon=True),
            threading.Thread(target=self._watch, name="llm-watcher", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def accept(self, request: Any) -> None:
        """Take a request in, or answer it with what is wrong with it. Raises nothing: the others would suffer."""
        sender = request.get_response_sender()
        try:
            self._submit(request, sender)
        except RequestError as error:
            log.debug("request %r refused: %s", request.request_id(), type(error).__name__)
            send_error(sender, error)
        except Exception as error:
            logging.exception("a request could not be read")
            send_error(sender, error)

    def _submit(self, request: Any, sender: Any) -> None:
        def tensor(name: str) -> np.ndarray | None:
            found = pb_utils.get_input_tensor_by_name(request, name)
            return None if found is None else found.as_numpy()

        wanted = read_request(tensor, request.parameters(), self._engine.tokenizer)
        reply = Reply(sender, wanted, self._engine.tokenizer, request.request_id(), batched=self._batched)
        with self._lock:
            self._replies[reply] = []
        try:
            generations = self._engine.submit(
                wanted.prompt, wanted.params, lambda ready: self._ready.put((reply, ready))
            )
        except BaseException:
            self._forget(reply)
            raise
        with self._lock:
            if reply in self._replies:
                self._replies[reply] = generations
                return
        for generation in generations:  # it has had its final response already
            self._engine.cancel(generation)

    def _send(self) -> None:
        """The only thread that sends what was generated; what piles up meanwhile goes out as one response."""
        while None not in (ready := self._take()):
            together: dict[Reply, list[Generation]] = {}
            for reply, generation in filter(None, ready):
                together.setdefault(reply, []).append(generation)
            for reply, generations in together.items():
                self._pass_on(reply, generations)

    def _take(self) -> list[tuple[Reply, Generation] | None]:
        """All that is ready, at least one: several answers to one prompt go out as one response."""
        taken = [self._ready.get()]
        with contextlib.suppress(queue.Empty):
            while taken[-1] is not None:
                taken.append(self._ready.get_nowait())
        return taken

    def _pass_on(self, reply: Reply, generations: list[Generation]) -> None:
        try:
            drained = {generation.index: generation.drain() for generation in generations}
            deltas = {index: delta for index, delta in drained.items() if delta}
            if deltas:
                reply.send(deltas)
        except Exception as error:
            logging.exception("a response could not be sent")
            reply.fail(error)
        if reply.closed:
            self._forget(reply)

    def _watch(self) -> None:
        """Triton tells nobody that a client has left; it has to be asked, for waiting and silent requests too."""
        spent = 0.0
        # Each question is a round trip to the server: with many requests this thread rests four fifths of its time.
        while not self._closing.wait(max(WATCH_SECONDS, 4 * spent)):
            began = time.perf_counter()
            with self._lock:
                held = [(reply, generations) for reply, generations in self._replies.items() if generations]
            for reply, generations in held:
                if not reply.cancelled and reply.is_cancelled():
                    log.debug("Cancelling the request %r", reply.request_id)
                    for generation in generations:
                        self._engine.cancel(generation)
            spent = time.perf_counter() - began

    def _forget(self, reply: Reply) -> None:
        with self._lock:
            generations = self._replies.pop(reply, [])
            if not self._replies:
                self._idle.notify_all()
        for generation in generations:
            if not generation.finished:  # as when another answer to the same request has failed
                self._engine.cancel(generation)
        if generations:
            _log_end(reply, generations)

    def wait_until_idle(self) -> None:
        """Until every request that was accepted has had its final response."""
        with self._lock:
            self._idle.wait_for(lambda: not self._replies)

    @property
    def is_healthy(self) -> bool:
        return self._engine.failure is None

    def close(self) -> None:
        """Finish what is running, then end all threads.

        A process that hangs on its way out would hold up the whole server until its exit timeout. Nothing is in flight
        any more when Triton asks for this, so one that takes long is ended, and its log says where it hung.
        """
        faulthandler.dump_traceback_later(CLOSE_SECONDS, exit=True)
        self._engine.close()
        self._closing.set()
        self._ready.put(None)
        for thread in self._threads:
            thread.join()
        if self._metrics:
            self._metrics.close()


def _log_end(reply: Reply, generations: list[Generation]) -> None:
    """One line for a request, shown with --log-verbose=1. No text of anybody's is ever logged."""
    if reply.cancelled:
        log.debug("Successfully cancelled the request %r", reply.request_id)
    sequences = [generation.sequence for generation in generations]
    log.debug(
        "request %r: %d prompt tokens, %s tokens, %s, %.3f s",
        reply.request_id,
        len(sequences[0].prompt),
        "+".join(str(sequence.num_output) for sequence in sequences),
        "+".join(sequence.finish_reason.value if sequence.finish_reason else "stop string" for sequence in sequences),
        time.perf_counter() - sequences[0].times.arrived,
    )
