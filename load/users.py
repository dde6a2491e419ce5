"""Locust's users: each takes a request when its time has come, sends it and reports the answer.

What Locust shows counts from the intended start, as the samples do. TTFT gets a row of its own in Locust's table that
is no part of the row Aggregated, for that would mix two latencies and count each request twice.
"""

import time
from typing import ClassVar

from locust import User, task
from locust.exception import StopUser

from load.clients import Answer, Client, LlmGrpcClient, LlmHttpClient, RequestFailed, SdxlClient
from load.dispatch import Dispatcher
from load.samples import Kind, Protocol, Sample


class LoadUser(User):
    abstract = True
    kind: ClassVar[Kind]
    protocol: ClassVar[Protocol]
    client: Client

    def on_start(self) -> None:
        if self.environment.lab.dispatcher is None:
            raise StopUser
        self.dispatcher: Dispatcher = self.environment.lab.dispatcher
        self.address = self.host.removeprefix("http://").rstrip("/")
        try:
            self.client = self.connect(self.dispatcher.options.model, self.environment.lab.batched(self))
        except RequestFailed as error:
            self.dispatcher.fail(str(error))
            raise StopUser from error
        self.environment.lab.connected += 1

    def connect(self, model: str, batched: bool) -> Client:
        raise NotImplementedError

    def on_stop(self) -> None:
        if hasattr(self, "client"):
            self.client.close()

    @task
    def ride(self) -> None:
        departure = self.dispatcher.take()
        answer, failure = Answer(), None  # type: Answer, Exception | None
        started = time.perf_counter()
        try:
            self.client.ask(departure.work, answer, self.dispatcher.options.request_timeout)
        except Exception as error:  # whatever it was: the run waits for every request
            failure = error
        ended = time.perf_counter()
        sample = self.dispatcher.give_back(departure, started, answer, ended, str(failure) if failure else None)
        if departure.measured:
            self.show(sample, answer.size, failure)

    def show(self, sample: Sample, size: int, failure: Exception | None) -> None:
        latency = sample.ended - sample.intended if failure else sample.e2el
        self.environment.events.request.fire(
            request_type=self.protocol,
            name=sample.model,
            response_time=(latency or 0.0) * 1e3,
            response_length=size,
            exception=failure,
            context={},
        )
        if self.kind == "llm" and not failure and sample.ttft is not None:
            self.environment.stats.get(sample.model, "TTFT").log(sample.ttft * 1e3, 0)


class LlmGrpcUser(LoadUser):
    kind, protocol, host = "llm", "grpc", "localhost:8001"

    def connect(self, model: str, batched: bool) -> Client:
        return LlmGrpcClient(self.address, model, batched)


class LlmHttpUser(LoadUser):
    kind, protocol, host = "llm", "http", "localhost:8000"

    def connect(self, model: str, batched: bool) -> Client:
        return LlmHttpClient(self.address, model)  # Triton itself adds the batch dimension to JSON


class SdxlGrpcUser(LoadUser):
    kind, protocol, host = "sdxl", "grpc", "localhost:8001"

    def connect(self, model: str, batched: bool) -> Client:
        return SdxlClient(self.protocol, self.address, model, batched, self.dispatcher.options.request_timeout)


class SdxlHttpUser(LoadUser):
    kind, protocol, host = "sdxl", "http", "localhost:8000"

    def connect(self, model: str, batched: bool) -> Client:
        return SdxlClient(self.protocol, self.address, model, batched, self.dispatcher.options.request_timeout)
