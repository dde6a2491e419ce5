"""The pipeline's work on Triton's metrics page. Only execute() may use it: Triton's metrics are not thread-safe."""

from collections.abc import Sequence
from typing import Any

import triton_python_backend_utils as pb_utils

BATCHES = [1, 2, 4, 8, 12, 16, 32]
SECONDS = [0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5]


class Metrics:
    def __init__(self, labels: dict[str, str]) -> None:
        # Kept: a family that is collected takes its metrics with it.
        self._families: list[Any] = []

        def metric(name: str, description: str, kind: Any, **options: Any) -> Any:
            family = pb_utils.MetricFamily(name=name, description=description, kind=kind)
            self._families.append(family)
            return family.Metric(labels=labels, **options)

        def counter(name: str, description: str) -> Any:
            return metric(name, description, pb_utils.MetricFamily.COUNTER)

        def histogram(name: str, description: str, buckets: Sequence[float]) -> Any:
            return metric(name, description, pb_utils.MetricFamily.HISTOGRAM, buckets=list(buckets))

        self._batch = histogram("sdxl:batch_size", "Pictures that started a denoising loop together", BATCHES)
        self._step = histogram("sdxl:step_seconds", "Seconds of one UNet call for a whole batch", SECONDS)
        self._steps = counter("sdxl:picture_steps_total", "Denoising steps, counted once for each picture in the batch")
        self._pictures = counter("sdxl:images_total", "Pictures made")
        self._failures = counter("sdxl:failures_total", "Pictures that ended with an error, cancelled ones included")

    def batch(self, pictures: int) -> None:
        self._batch.observe(pictures)

    def step(self, pictures: int, seconds: float) -> None:
        self._step.observe(seconds)
        self._steps.increment(pictures)

    def picture(self, made: bool) -> None:
        (self._pictures if made else self._failures).increment(1)
