"""Draws 100 held-out captions with the exported pipeline, lets the judge count, writes figures and a contact sheet."""

import json
from pathlib import Path

import numpy as np
import torch
from diffusers import StableDiffusionXLPipeline
from PIL import Image, ImageDraw
from tqdm import tqdm

from training.judge import Verdict, judge
from training.shapes import SIZE, Scene, caption, draw, sample_scene

CAPTIONS = 100
STEPS, GUIDANCE = 20, 1.5
_COLUMNS, _ROWS, _ZOOM = 5, 4, 3


def run(folder: Path, sheet: Path, seed: int) -> None:
    rng = np.random.default_rng([seed, 7])
    scenes = [sample_scene(rng, held_out=True) for _ in range(CAPTIONS)]
    images = generate(folder, [caption(scene) for scene in scenes], seed)
    truth = [sample_scene(rng, held_out=True) for _ in range(1000)]
    figures = {
        "captions": CAPTIONS,
        "steps": STEPS,
        "guidance_scale": GUIDANCE,
        "scheduler": "euler",
        **score(scenes, images),
        "judge_on_1000_drawn_scenes": score(truth, [draw(scene) for scene in truth])["everything"],
    }
    (folder / "accuracy.json").write_text(json.dumps(figures, indent=2) + "\n")
    print(json.dumps(figures, indent=2), flush=True)
    sheet.parent.mkdir(parents=True, exist_ok=True)
    contact_sheet(scenes, images).save(sheet, optimize=True)


@torch.inference_mode()
def generate(folder: Path, captions: list[str], seed: int) -> list[Image.Image]:
    pipeline = StableDiffusionXLPipeline.from_pretrained(folder, dtype=torch.float32, add_watermarker=False)
    pipeline.set_progress_bar_config(disable=True)
    images: list[Image.Image] = []
    for start in tqdm(range(0, len(captions), 20), "evaluating"):
        part = captions[start : start + 20]
        generators = [torch.Generator().manual_seed(seed + start + i) for i in range(len(part))]
        images += pipeline(part, num_inference_steps=STEPS, guidance_scale=GUIDANCE, generator=generators).images
    return images


def score(scenes: list[Scene], images: list[Image.Image]) -> dict[str, float]:
    """Shares of pictures that are right: each aspect over all, and everything by kind of scene."""
    verdicts = [judge(image, scene) for image, scene in zip(images, scenes, strict=True)]
    figures = {
        aspect: _share([getattr(verdict, aspect) for verdict in verdicts])
        for aspect in ("background", "colours", "count", "shapes", "placed", "everything")
    }
    for kind in ("single", "count", "pair"):
        right = [verdict.everything for verdict, scene in zip(verdicts, scenes, strict=True) if scene.kind == kind]
        figures |= {f"everything_{kind}": _share(right), f"captions_{kind}": len(right)}
    return figures


def failures(scenes: list[Scene], images: list[Image.Image]) -> list[tuple[Scene, Verdict]]:
    verdicts = [(scene, judge(image, scene)) for image, scene in zip(images, scenes, strict=True)]
    return [(scene, verdict) for scene, verdict in verdicts if not verdict.everything]


def contact_sheet(scenes: list[Scene], images: list[Image.Image]) -> Image.Image:
    """The first twenty pictures, not chosen, each over its caption; a red bar marks those that the judge rejects."""
    cell, text = SIZE * _ZOOM, 34
    sheet = Image.new("RGB", (_COLUMNS * (cell + 8) + 8, _ROWS * (cell + text) + 8), "white")
    pen = ImageDraw.Draw(sheet)
    for i, (scene, image) in enumerate(zip(scenes[: _COLUMNS * _ROWS], images, strict=False)):
        x, y = 8 + i % _COLUMNS * (cell + 8), 8 + i // _COLUMNS * (cell + text)
        sheet.paste(image.resize((cell, cell), Image.Resampling.BICUBIC), (x, y))
        pen.rectangle((x, y, x + cell - 1, y + cell - 1), outline="grey")
        if not judge(image, scene).everything:
            pen.rectangle((x, y + cell + 1, x + cell - 1, y + cell + 3), fill="red")
        words = caption(scene)
        cut = words.rfind(" ", 0, 33) if len(words) > 32 else len(words)
        pen.text((x, y + cell + 4), f"{words[:cut]}\n{words[cut + 1 :]}", fill="black")
    return sheet


def _share(values: list[bool]) -> float:
    return round(sum(values) / max(1, len(values)), 4)
