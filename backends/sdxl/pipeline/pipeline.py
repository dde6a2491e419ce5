"""A batch of unlike requests to pictures: one UNet call a step for all that share a size and the use of guidance.

Steps, guidance scale, scheduler, seed and texts are each picture's own. One with fewer steps leaves the batch early.
"""

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pipeline import picture, text
from pipeline.config import PipelineConfig
from pipeline.errors import PipelineFailure, RequestError
from pipeline.parts import Parts
from pipeline.trajectory import Job, Trajectory

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Picture:
    pixels: NDArray[np.uint8]  # [height, width, 3]
    file: bytes  # as the request's format and encoding say


Outcome = tuple[Job, Picture | RequestError]


class Observer(Protocol):
    """Told of the work as it is done, by the thread that does it."""

    def batch(self, pictures: int) -> None: ...

    def step(self, pictures: int, seconds: float) -> None: ...


class Pipeline:
    def __init__(self, config: PipelineConfig, parts: Parts, observer: Observer | None = None) -> None:
        self.config = config
        self.parts = parts
        self._observer = observer

    def run(self, jobs: Iterable[Job]) -> Iterator[Outcome]:
        """Yields every job once, as soon as its picture is done or its request has failed."""
        groups: dict[tuple[int, int, bool], list[Job]] = {}
        for job in jobs:
            request = job.request
            groups.setdefault((request.width, request.height, request.guided), []).append(job)
        for group in groups.values():
            for start in range(0, len(group), self.config.max_batch):
                yield from self._run_batch(group[start : start + self.config.max_batch])

    def _run_batch(self, jobs: list[Job]) -> Iterator[Outcome]:
        active: list[Trajectory] = []
        try:
            texts = self._encode(jobs)
        except Exception as error:
            log.exception("the texts of a batch could not be encoded")
            yield from ((job, _failure(error)) for job in jobs)
            return
        for job in jobs:
            try:
                active.append(self._start(job, texts))
            except Exception as error:
                yield job, _failure(error)
        if self._observer and active:
            self._observer.batch(len(active))
        while active:
            yield from _drop(active, [_try(trajectory.job.check) for trajectory in active])
            if not active:
                return
            try:
                predictions, unguided = self._predict(active)
            except Exception as error:
                log.exception("the UNet failed on a batch of %d", len(active))
                yield from ((trajectory.job, _failure(error)) for trajectory in active)
                return
            yield from _advance(active, predictions, unguided)
            finished = [trajectory for trajectory in active if trajectory.done]
            active = [trajectory for trajectory in active if not trajectory.done]
            for trajectory in finished:
                yield trajectory.job, self._finish(trajectory)

    @torch.inference_mode()
    def _encode(self, jobs: list[Job]) -> dict[str, text.Text]:
        wanted = [job.request.prompt for job in jobs]
        # No negative prompt means either zeros, whose shape "" gives, or the encoding of "" itself.
        wanted += [job.request.negative_prompt for job in jobs if job.request.guided]
        return text.encode(self.parts, wanted, 1 if self.config.mode == "exact" else self.config.max_batch)

    @torch.inference_mode()
    def _start(self, job: Job, texts: dict[str, text.Text]) -> Trajectory:
        request, negative = job.request, None
        if request.guided:
            negative = texts[request.negative_prompt]
            if not request.negative_prompt and self.parts.zero_negative:
                negative = text.zeros_like(negative)
        return Trajectory(job, self.parts, texts[request.prompt], negative)

    @torch.inference_mode()
    def _predict(self, active: list[Trajectory]) -> tuple[Tensor, Tensor | None]:
        """What the UNet makes of each latent, [B, C, h, w]: with its prompt, and in a guided batch without it too."""
        started = time.perf_counter()
        padding = [active[-1]] * (self.config.padded(len(active)) - len(active))
        rows = [*active, *padding]
        parts = self.parts
        latents = torch.cat([row.model_input() for row in rows])
        timesteps = torch.stack([row.timestep for row in rows]).to(torch.float32)
        sizes = torch.stack([row.sizes for row in rows]).to(parts.device)
        told = [row.text for row in rows]
        negatives = [row.negative for row in rows if row.negative is not None]
        if negatives:
            told = [*negatives, *told]
            latents, timesteps, sizes = (torch.cat([t, t]) for t in (latents, timesteps, sizes))
        output = parts.unet(
            parts.laid_out(latents.to(parts.dtype)),
            timesteps,
            encoder_hidden_states=torch.stack([t.tokens for t in told]),
            added_cond_kwargs={"text_embeds": torch.stack([t.pooled for t in told]), "time_ids": sizes},
            return_dict=False,
        )[0].float()
        if self._observer:
            self._observer.step(len(active), time.perf_counter() - started)
        return (output[len(rows) :], output[: len(rows)]) if negatives else (output, None)

    @torch.inference_mode()
    def _finish(self, trajectory: Trajectory) -> Picture | RequestError:
        request = trajectory.job.request
        try:
            trajectory.job.check()
            pixels = picture.decode(self.parts, trajectory.latent)
            return Picture(pixels, picture.encode(pixels, request.format, request.encoding))
        except Exception as error:
            return _failure(error)


@torch.inference_mode()
def _advance(active: list[Trajectory], predictions: Tensor, unguided: Tensor | None) -> list[Outcome]:
    errors = []
    for i, trajectory in enumerate(active):
        row = slice(i, i + 1)
        errors.append(_try(trajectory.advance, predictions[row], None if unguided is None else unguided[row]))
    return _drop(active, errors)


def _try(action: Callable[..., None], *arguments: object) -> RequestError | None:
    try:
        action(*arguments)
    except Exception as error:
        return _failure(error)
    return None


def _drop(active: list[Trajectory], errors: list[RequestError | None]) -> list[Outcome]:
    """Those with an error leave `active`, and only those."""
    outcomes: list[Outcome] = [(t.job, error) for t, error in zip(active, errors, strict=True) if error]
    active[:] = [t for t, error in zip(active, errors, strict=True) if not error]
    return outcomes


def _failure(error: Exception) -> RequestError:
    if isinstance(error, RequestError):
        return error
    log.error("a picture failed: %s", error, exc_info=error)
    return PipelineFailure(f"the model failed: {type(error).__name__}: {error}")
