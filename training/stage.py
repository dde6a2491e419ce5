"""One training stage: steps with a progress bar, an average of the weights, and checkpoints to go on from."""

import math
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from tqdm import tqdm

Loss = Callable[[int], Tensor]


def learning_rate(step: int, steps: int, peak: float, warm_up: int) -> float:
    """Linear warm-up, then one cosine down to zero."""
    if step < warm_up:
        return peak * (step + 1) / warm_up
    return peak * 0.5 * (1 + math.cos(math.pi * (step - warm_up) / max(1, steps - warm_up)))


def train(
    name: str, model: nn.Module, loss: Loss, folder: Path, *, steps: int, peak: float, warm_up: int = 100,
    decay: float = 0.999,
    betas: tuple[float, float] = (0.9, 0.99), every: int = 200,
) -> None:  # fmt: skip
    """Leaves the averaged weights in `model`.

    `loss(step)` draws its own batch from seeds made of the step, so a resumed run sees the same data.
    """
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=peak, betas=betas, weight_decay=0.01, fused=True)
    average = [p.detach().clone() for p in trainable]
    file, start = folder / f"{name}.pt", 0
    if file.exists():
        saved = torch.load(file, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        average, start = saved["average"], saved["step"]
    bar = tqdm(range(start, steps), name, initial=start, total=steps, mininterval=5)
    mean = None
    for step in bar:
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, steps, peak, warm_up)
        value = loss(step)
        value.backward()
        nn.utils.clip_grad_norm_(trainable, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        keep = min(decay, (1 + step) / (10 + step))
        torch._foreach_lerp_(average, [p.detach() for p in trainable], 1 - keep)
        mean = value.item() if mean is None else 0.98 * mean + 0.02 * value.item()
        bar.set_postfix(loss=f"{mean:.4f}", refresh=False)
        if (step + 1) % every == 0 or step + 1 == steps:
            state = {
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "average": average,
                "step": step + 1,
            }
            torch.save(state, file.with_suffix(".tmp"))
            file.with_suffix(".tmp").replace(file)
    with torch.no_grad():
        for parameter, averaged in zip(trainable, average, strict=True):
            parameter.copy_(averaged)
