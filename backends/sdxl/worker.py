"""One instance of a model: a batch that Triton's dynamic batcher made, to answers."""

import json
import logging
from pathlib import Path
from typing import Any

import tensors
import torch
import triton_python_backend_utils as pb_utils
from answer import Answer
from observer import Metrics
from pipeline.config import PipelineConfig
from pipeline.errors import ConfigError, PipelineFailure, RequestError
from pipeline.loader import load_parts
from pipeline.pipeline import Picture, Pipeline
from pipeline.request import parse
from pipeline.trajectory import Job


class Worker:
    def __init__(self, args: dict[str, str]) -> None:
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
        except Exception:  # raised on, it would make Triton end once more what is answered already
            logging.exception("the pipeline failed")
        for answer in answers:  # nothing happens to those that have one
            answer.fail(PipelineFailure("the pipeline ended without an answer"))

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
