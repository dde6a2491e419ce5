"""The load lab inside Locust: makes a run when a test starts, and passes Locust's events and messages on to it.

all users of a process connected --> warm-up --> load_ready --> load_begin to everybody --> samples --> load_done
"""

import logging
from typing import Any

import gevent
import gevent.lock
from locust import runners

from load.clients import takes_batches
from load.conductor import Conductor
from load.dispatch import Dispatcher, Share
from load.options import Options

logger = logging.getLogger(__name__)


class Lab:
    """One per process and Locust environment. The only process of a run conducts it and sends requests as well."""

    def __init__(self, environment: Any) -> None:
        self.environment, self.runner = environment, environment.runner
        self._conducts = not isinstance(self.runner, runners.WorkerRunner)
        self._sends = not isinstance(self.runner, runners.MasterRunner)
        self.conductor: Conductor | None = None
        self.dispatcher: Dispatcher | None = None
        self.connected = 0  # users of this process
        self.refused = False  # an option of the web page was wrong
        self._getting_ready = False
        self._batched: bool | None = None
        self._asking = gevent.lock.RLock()
        environment.events.test_start.add_listener(self._start)
        environment.events.test_stop.add_listener(self._stop)
        environment.events.quit.add_listener(self._close)
        if self._sends:
            environment.events.spawning_complete.add_listener(self._spawned)
            self._listen("load_begin", self._begin)
        if self._conducts:
            self._listen("load_ready", lambda data, node: self._ready(node, data["users"]))
            self._listen("load_samples", lambda data, node: self._conduct().collect(data["samples"]))
            self._listen("load_done", lambda data, node: self._conduct().done(node, data))
            self._listen("load_failed", lambda data, node: self._conduct().fail(data["reason"]))

    def _listen(self, message: str, heard: Any) -> None:
        self.runner.register_message(message, lambda environment, msg, **_: heard(msg.data, msg.node_id))

    def batched(self, user: Any) -> bool:
        """Whether the model takes a batch dimension: asked by the first user, for all of this process."""
        with self._asking:
            if self._batched is None:
                self._batched = takes_batches(user.protocol, user.address, user.dispatcher.options.model)
            return self._batched

    def tick(self) -> tuple[int, float] | None:
        """Locust's question once a second: how many users, and how many more each second; None ends the run."""
        if self.refused:
            self.environment.process_exit_code = 1
            self.refused = False
            return None
        if self.conductor and not self.conductor.ended:
            if isinstance(self.runner, runners.MasterRunner):
                self.conductor.check(node.id for node in self.runner.clients.all if node.state != runners.STATE_MISSING)
            if self.conductor.finished:
                self.environment.process_exit_code = 1 if self.conductor.failure else None
                return None
        options = self.environment.parsed_options
        return options.num_users, options.spawn_rate

    def _start(self, **_: Any) -> None:
        """A test starts, by the command line or the web page."""
        self._close()
        self._getting_ready = False
        self.connected, self._batched, self.dispatcher, self.conductor = 0, None, None, None
        given, user = self.environment.parsed_options, self.environment.user_classes[0]
        try:
            if len(self.environment.user_classes) > 1:
                raise ValueError("several user classes are named; allowed: one")
            options = Options.of(given, user.kind)
        except (ValueError, OSError) as error:
            logger.error("error: %s", error)
            self.refused = True
            return
        if self._sends:
            self.dispatcher = Dispatcher(options, user.kind, user.protocol, self.runner.send_message)
        if self._conducts:
            self.conductor = Conductor(options, given.run_time or None, self.runner.send_message)

    def _stop(self, **_: Any) -> None:
        if self.dispatcher:
            self.dispatcher.stop()
        if self.conductor:
            self.conductor.end()

    def _close(self, **_: Any) -> None:
        if self.conductor:
            self.conductor.close()

    def _spawned(self, user_count: int, **_: Any) -> None:
        if self.dispatcher and not self._getting_ready:
            self._getting_ready = True
            gevent.spawn(self._get_ready, self.dispatcher)

    def _get_ready(self, dispatcher: Dispatcher) -> None:
        users = self.runner.user_count
        while self.connected < users:
            if dispatcher is not self.dispatcher:
                return
            gevent.sleep(0.02)
        if users:
            dispatcher.warm_up()
        self.runner.send_message("load_ready", {"users": users})

    def _ready(self, node: str, users: int) -> None:
        if isinstance(self.runner, runners.MasterRunner):
            workers = {node.id for node in self.runner.clients.all if node.state != runners.STATE_MISSING}
        else:
            workers = {node}
        self._conduct().ready(node, users, workers)

    def _begin(self, data: dict[str, Any], node: str) -> None:
        assert self.dispatcher
        self.environment.stats.reset_all()  # rates are the run's: they don't count the time before
        self.dispatcher.begin(Share(**data), self.runner.user_count)

    def _conduct(self) -> Conductor:
        assert self.conductor
        return self.conductor
