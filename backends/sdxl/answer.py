"""One Triton request while its pictures are made: it ends with exactly one response."""

import logging
from typing import Any

import tensors
import triton_python_backend_utils as pb_utils
from pipeline.errors import Cancelled, DeadlineExceeded, InvalidRequest, RequestError
from pipeline.pipeline import Picture
from pipeline.request import ImageRequest
from pipeline.trajectory import Job

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
STATUS = {
    InvalidRequest: pb_utils.TritonError.INVALID_ARG,
    Cancelled: pb_utils.TritonError.CANCELLED,
    DeadlineExceeded: pb_utils.TritonError.UNAVAILABLE,  # as Triton's own queue says it
}


class Answer:
    """Collects the pictures of one request; sent when all are there, or when one has failed."""

    def __init__(self, request: Any, batched: bool) -> None:
        self._request = request
        self._sender = request.get_response_sender()
        self._batched = batched
        self._pictures: dict[Job, Picture | None] = {}
        self.sent = False

    def jobs(self, wanted: list[ImageRequest]) -> list[Job]:
        self._pictures = {Job(request, self._is_over): None for request in wanted}
        return list(self._pictures)

    def _is_over(self) -> bool:
        return self.sent or bool(self._request.is_cancelled())

    def add(self, job: Job, outcome: Picture | RequestError) -> None:
        if self.sent:
            return
        if isinstance(outcome, RequestError):
            self.fail(outcome)
            return
        self._pictures[job] = outcome
        pictures = [picture for picture in self._pictures.values() if picture is not None]
        if len(pictures) < len(self._pictures):
            return
        requests = [job.request for job in self._pictures]
        seeds = [request.seed for request in requests]
        self._send(tensors.write(self._request, pictures, seeds, requests[0].generated_image, self._batched))

    def fail(self, error: Exception) -> None:
        if not self.sent:
            status = STATUS.get(type(error), pb_utils.TritonError.INTERNAL)
            self._send(pb_utils.InferenceResponse(output_tensors=[], error=pb_utils.TritonError(str(error), status)))

    def _send(self, response: Any) -> None:
        self.sent = True
        try:
            self._sender.send(response, flags=FINAL)
        except Exception:  # the other requests of the batch go on
            logging.exception("a response could not be sent")
