"""One picture on its way from noise: everything that it does not share with its batch."""

import inspect
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from pipeline import schedulers
from pipeline.errors import Cancelled, DeadlineExceeded
from pipeline.parts import Parts
from pipeline.request import ImageRequest
from pipeline.text import Text


@dataclass(frozen=True, eq=False)
class Job:
    """A request and how to learn that its sender has left."""

    request: ImageRequest
    is_cancelled: Callable[[], bool] = lambda: False
    started: float = field(default_factory=time.monotonic)

    def check(self) -> None:
        """Raises Cancelled or DeadlineExceeded."""
        if self.is_cancelled():
            raise Cancelled("the request was cancelled")
        limit = self.request.timeout_us
        if limit and time.monotonic() - self.started > limit / 1e6:
            raise DeadlineExceeded(f"the picture was not done within the request's timeout of {limit} microseconds")


class Trajectory:
    """Latent [1, C, h, w] in float32, its noise generator, its scheduler and its texts."""

    def __init__(self, job: Job, parts: Parts, text: Text, negative: Text | None) -> None:
        request = job.request
        self.job = job
        self.text = text
        self.negative = negative
        self.sizes = torch.tensor(
            [request.height, request.width, 0, 0, request.height, request.width], dtype=parts.dtype
        )
        # On the CPU whatever the device, so that a seed means the same picture everywhere.
        self._generator = torch.Generator().manual_seed(request.seed)
        self._scheduler = schedulers.build(request.scheduler, parts.scheduler_config, request.steps, parts.device)
        shape = (1, parts.latent_channels, request.height // parts.scale, request.width // parts.scale)
        noise = torch.randn(shape, generator=self._generator)
        self.latent = noise.to(parts.device) * self._scheduler.init_noise_sigma
        self._options = {"generator": self._generator} if _takes_generator(self._scheduler) else {}
        self._position = 0

    @property
    def done(self) -> bool:
        return self._position == len(self._scheduler.timesteps)

    @property
    def timestep(self) -> Tensor:
        timestep: Tensor = self._scheduler.timesteps[self._position]
        return timestep

    def model_input(self) -> Tensor:
        scaled: Tensor = self._scheduler.scale_model_input(self.latent, self.timestep)
        return scaled

    def advance(self, prediction: Tensor, unguided: Tensor | None) -> None:
        """One step along the UNet's prediction [1, C, h, w]; guidance leads away from the one without the prompt."""
        if unguided is not None:
            prediction = unguided + self.job.request.guidance_scale * (prediction - unguided)
        self.latent = self._scheduler.step(prediction, self.timestep, self.latent, **self._options, return_dict=False)[
            0
        ]
        self._position += 1


def _takes_generator(scheduler: object) -> bool:
    return "generator" in inspect.signature(scheduler.step).parameters  # type: ignore[attr-defined]
