"""Schedulers by the names that requests use. Each picture gets an object of its own: schedulers keep their place."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from diffusers import (
    DDIMScheduler,
    DPMSolverMultistepScheduler,
    EulerAncestralDiscreteScheduler,
    EulerDiscreteScheduler,
    LCMScheduler,
)


@dataclass(frozen=True)
class SchedulerKind:
    """`steps` and `guidance_scale` are what a request gets that names neither."""

    factory: Any
    steps: int
    guidance_scale: float
    settings: Mapping[str, object] = field(default_factory=dict)
    most_steps: int = 1000  # a scheduler can't have more steps than noise levels


SCHEDULERS: dict[str, SchedulerKind] = {
    "euler": SchedulerKind(EulerDiscreteScheduler, 20, 5.0),
    "euler_a": SchedulerKind(EulerAncestralDiscreteScheduler, 20, 5.0),
    "dpm++_2m": SchedulerKind(
        DPMSolverMultistepScheduler, 20, 5.0, {"algorithm_type": "dpmsolver++", "solver_order": 2}
    ),
    "ddim": SchedulerKind(DDIMScheduler, 30, 5.0, {"clip_sample": False}),
    # For weights distilled to few steps (SDXL Turbo; LCM): no guidance, so half the work a step.
    "turbo": SchedulerKind(EulerAncestralDiscreteScheduler, 4, 0.0, {"timestep_spacing": "trailing"}),
    # LCM picks its steps out of the 50 that it was distilled from.
    "lcm": SchedulerKind(LCMScheduler, 4, 0.0, most_steps=50),
}


def build(name: str, trained: Mapping[str, Any], steps: int, device: Any) -> Any:
    """A scheduler of the kind `name` at its first step, with the noise levels that the model was trained on."""
    kind = SCHEDULERS[name]
    scheduler = kind.factory.from_config(dict(trained), **kind.settings)
    scheduler.set_timesteps(steps, device=device)
    return scheduler
