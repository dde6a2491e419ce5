"""Triton's side of the SDXL backend: requests in, responses out. The pipeline knows nothing of Triton.

execute(): a batch that Triton's dynamic batcher made --> Pipeline.run --> each answer as soon as its pictures are done
"""

import locale

# The embedded interpreter ignores LANG and would read files as ASCII.
locale.setlocale(locale.LC_CTYPE, "C.UTF-8")

import json  # noqa: E402
import logging  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

import tensors  # noqa: E402
import torch  # noqa: E402
import triton_python_backend_utils as pb_utils  # noqa: E402
from answer import Answer  # noqa: E402
from observer import Metrics  # noqa: E402
from pipeline.config import PipelineConfig  # noqa: E402
from pipeline.errors import ConfigError, PipelineFailure, RequestError  # noqa: E402
from pipeline.loader import load_parts  # noqa: E402
from pipeline.pipeline import Picture, Pipeline  # noqa: E402
from pipeline.request import parse  # noqa: E402
from pipeline.trajectory import Job  # noqa: E402


class TritonPythonModel:
    @staticmethod
    def auto_complete_config(auto_complete_model_config: Any) -> Any:
        return tensors.complete(auto_complete_model_config)

    def initialize(self, args: dict[str, str]) -> None:
        _log_through_triton()
        model_directory = Path(args["model_repository"])
        self._batched = json.loads(args["model_config"])["max_batch_size"] > 0
        self._metrics = Metrics({"model": args["model_name"], "version": args["model_version"]})
        try:
            config = PipelineConfig.from_file(model_directory / args["model_version"] / "model.json")
            parts = load_parts(config := config.resolved(model_directory.parent), _device(args))
        except ConfigError as error:
            raise pb_utils.TritonModelException(str(error)) from error
        self._pipeline = Pipeline(config, parts, self._metrics)

    def execute(self, requests: list[Any]) -> None:
        """Blocks until the whole batch is answered: what comes meanwhile is Triton's queue to hold, limit, time out."""
        answers = [Answer(request, self._batched) for request in requests]
        waiting: dict[Job, Answer] = {}
        for request, answer in zip(requests, answers, strict=True):
            try:
                waiting |= dict.fromkeys(self._read(request, answer), answer)
            except RequestError as error:
                answer.fail(error)
            except Exception as error:  # one request's trouble must not become that of all in this call
                logging.exception("a request could not be read")
                answer.fail(error)
        try:
            for job, outcome in self._pipeline.run(waiting):
                waiting[job].add(job, outcome)
                self._metrics.picture(made=isinstance(outcome, Picture))
        finally:
            for answer in answers:
                answer.fail(
                    PipelineFailure("the pipeline ended without an answer")
                )  # does nothing to those that have one

    def _read(self, request: Any, answer: Answer) -> list[Job]:
        prompts = tensors.read_texts(request, "prompt") or []
        negatives = tensors.read_texts(request, "negative_prompt")
        parameters = tensors.read_parameters(request)
        return answer.jobs(parse(prompts, negatives, parameters, self._pipeline.config, self._pipeline.parts.sizes))


def _device(args: dict[str, str]) -> torch.device | None:
    """What the instance_group of config.pbtxt says; None leaves it to model.json and the machine."""
    kind = args["model_instance_kind"]
    if kind == "GPU":
        return torch.device("cuda", int(args["model_instance_device_id"]))
    return torch.device("cpu") if kind == "CPU" else None


def _log_through_triton() -> None:
    levels = {logging.DEBUG: "log_verbose", logging.INFO: "log_info", logging.WARNING: "log_warn"}

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            write = getattr(pb_utils.Logger, levels.get(record.levelno, "log_error"))
            write(f"[sdxl] {self.format(record)}")

    logging.basicConfig(handlers=[Handler()], level=logging.WARNING, force=True)
    logging.getLogger("pipeline").setLevel(logging.INFO)
