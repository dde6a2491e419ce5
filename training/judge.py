"""Decides from a picture alone whether it shows its scene: colours, shapes, count, position, size.

Plain image arithmetic, no learned part.
"""

from collections import Counter
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from training.shapes import ANCHORS, COLOURS, SHAPES, SIZE, Scene, Thing, draw

_NAMES = list(COLOURS)
_PALETTE = np.array([COLOURS[name] for name in _NAMES], np.float32)
_FOREGROUND = 75.0  # RGB distance from the background colour: the nearest two palette colours are 92 apart
_SPECK = 24  # pixels: a smaller patch is noise, the smallest object has 100
_TEMPLATE = 24  # pixels a side of the bounding box to which shapes are scaled for comparison

Mask = NDArray[np.bool_]


@dataclass(frozen=True)
class Seen:
    shape: str
    colour: str
    x: float
    y: float
    height: int


@dataclass(frozen=True)
class Verdict:
    background: bool
    colours: bool  # the set of object colours is right
    count: bool
    shapes: bool
    placed: bool  # position, relation and size, as far as the caption names them

    @property
    def everything(self) -> bool:
        return self.background and self.colours and self.count and self.shapes and self.placed


def judge(image: Image.Image, scene: Scene) -> Verdict:
    background, seen = look(image)
    wanted = Counter((thing.shape, thing.colour) for thing in scene.things)
    return Verdict(
        background=background == scene.background,
        colours={thing.colour for thing in seen} == {thing.colour for thing in scene.things},
        count=len(seen) == len(scene.things),
        shapes=Counter((thing.shape, thing.colour) for thing in seen) == wanted,
        placed=_placed(seen, scene),
    )


def look(image: Image.Image) -> tuple[str, list[Seen]]:
    """The background's colour (of most pixels on the rim) and every separate object."""
    pixels = np.asarray(image.convert("RGB"), np.float32)
    nearest = np.linalg.norm(pixels[:, :, None] - _PALETTE, axis=-1).argmin(-1)
    rim = np.concatenate([nearest[0], nearest[-1], nearest[:, 0], nearest[:, -1]])
    background = int(np.bincount(rim, minlength=len(_NAMES)).argmax())
    foreground = np.linalg.norm(pixels - _PALETTE[background], axis=-1) > _FOREGROUND
    return _NAMES[background], [_describe(patch, nearest, background) for patch in _patches(foreground)]


def _describe(patch: Mask, nearest: NDArray[np.int64], background: int) -> Seen:
    votes = np.bincount(nearest[patch], minlength=len(_NAMES))
    votes[background] = 0
    rows, columns = np.flatnonzero(patch.any(1)), np.flatnonzero(patch.any(0))
    scaled = _scaled(patch)
    overlap = {shape: (scaled & t).sum() / (scaled | t).sum() for shape, t in _templates().items()}
    return Seen(
        shape=max(overlap, key=lambda shape: overlap[shape]),
        colour=_NAMES[int(votes.argmax())],
        x=float(columns[0] + columns[-1] + 1) / 2,
        y=float(rows[0] + rows[-1] + 1) / 2,
        height=int(rows[-1] - rows[0] + 1),
    )


def _placed(seen: list[Seen], scene: Scene) -> bool:
    if scene.kind == "single":
        if len(seen) != 1:
            return False
        thing = seen[0]
        nearest = min(ANCHORS, key=lambda name: (thing.x - ANCHORS[name][0]) ** 2 + (thing.y - ANCHORS[name][1]) ** 2)
        size = "large" if thing.height >= 35 else ""
        return (not scene.position or nearest == scene.position) and size == scene.size
    if scene.kind == "pair" and scene.relation != "and":
        where = {thing.colour: thing for thing in seen}
        a, b = (where.get(thing.colour) for thing in scene.things)
        if a is None or b is None:
            return False
        dx, dy = b.x - a.x, b.y - a.y
        ahead = {"to the left of": dx, "to the right of": -dx, "above": dy, "below": -dy}[scene.relation]
        return ahead > 8 and ahead > min(abs(dx), abs(dy))
    return True


def _patches(mask: Mask) -> list[Mask]:
    """Connected parts (four neighbours), specks left out."""
    left, patches = mask.copy(), []
    while left.any():
        start = np.unravel_index(left.argmax(), left.shape)
        patch = np.zeros_like(mask)
        todo = [(int(start[0]), int(start[1]))]
        left[todo[0]] = False
        while todo:
            y, x = todo.pop()
            patch[y, x] = True
            for near in ((y - 1, x), (y + 1, x), (y, x - 1), (y, x + 1)):
                if 0 <= near[0] < mask.shape[0] and 0 <= near[1] < mask.shape[1] and left[near]:
                    left[near] = False
                    todo.append(near)
        if patch.sum() >= _SPECK:
            patches.append(patch)
    return patches


def _scaled(patch: Mask) -> Mask:
    rows, columns = np.flatnonzero(patch.any(1)), np.flatnonzero(patch.any(0))
    box = patch[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
    image = Image.fromarray(box.astype(np.uint8) * 255).resize((_TEMPLATE, _TEMPLATE), Image.Resampling.BILINEAR)
    return np.asarray(image) > 127


@cache
def _templates() -> dict[str, Mask]:
    masks = {}
    for shape in SHAPES:
        scene = Scene("single", "black", (Thing(shape, "white", SIZE / 2, SIZE / 2, 14.0),))
        masks[shape] = _scaled(np.asarray(draw(scene).convert("L")) > 127)
    return masks
