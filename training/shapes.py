"""Captioned pictures of flat shapes, which the tiny SDXL learns to draw. A scene has two faces: draw and caption."""

import math
from dataclasses import dataclass
from functools import cache
from itertools import product

import numpy as np
from PIL import Image, ImageDraw

SIZE = 64  # pixels a side
_OVERSAMPLING = 4  # drawn this much larger and averaged down, for smooth edges

COLOURS: dict[str, tuple[int, int, int]] = {
    "red": (220, 40, 40),
    "green": (40, 170, 70),
    "blue": (50, 90, 225),
    "yellow": (248, 215, 60),
    "orange": (245, 135, 25),
    "purple": (145, 60, 190),
    "white": (245, 245, 245),
    "black": (25, 25, 25),
}
SHAPES = ("circle", "square", "triangle", "star", "diamond", "cross")
SIZES = {"": (13.5, 15.0), "large": (21.0, 23.0)}  # radius in pixels
ANCHORS: dict[str, tuple[int, int]] = {
    "top left": (16, 16), "top": (32, 16), "top right": (48, 16),
    "left": (16, 32), "centre": (32, 32), "right": (48, 32),
    "bottom left": (16, 48), "bottom": (32, 48), "bottom right": (48, 48),
}  # fmt: skip
RELATIONS = ("to the left of", "to the right of", "above", "below", "and")
# Objects of one scene are this large and keep a latent pixel between each other: nearer ones fuse in a 16x16 latent.
_GROUP_RADIUS = (12.0, 13.0)
_GROUPS = {2: ((16, 32), (48, 32)), 3: ((32, 16), (16, 48), (48, 48))}

Triple = tuple[str, str, str]  # shape, colour, background


@dataclass(frozen=True)
class Thing:
    shape: str
    colour: str
    x: float
    y: float
    radius: float


@dataclass(frozen=True)
class Scene:
    """`kind` is single, count or pair. `size`, `position` and `relation` are what the caption says, "" for nothing."""

    kind: str
    background: str
    things: tuple[Thing, ...]
    size: str = ""
    position: str = ""
    relation: str = ""
    says_background: bool = True

    def triples(self) -> set[Triple]:
        return {(thing.shape, thing.colour, self.background) for thing in self.things}


def caption(scene: Scene) -> str:
    first = scene.things[0]
    if scene.kind == "count":
        number = {2: "two", 3: "three"}[len(scene.things)]
        words = f"{number} {first.colour} {first.shape}{'es' if first.shape == 'cross' else 's'}"
    elif scene.kind == "pair":
        second = scene.things[1]
        words = f"{_noun(first)} {scene.relation} {_noun(second)}"
    else:
        words = _noun(first, scene.size)
        if scene.position:
            words += f" {'in' if scene.position == 'centre' else 'at'} the {scene.position}"
    return words + (f" on {_article(scene.background)} {scene.background} background" if scene.says_background else "")


def draw(scene: Scene) -> Image.Image:
    """RGB, 64x64."""
    canvas = Image.new("RGB", (SIZE * _OVERSAMPLING,) * 2, COLOURS[scene.background])
    pen = ImageDraw.Draw(canvas)
    for thing in scene.things:
        points = [
            ((thing.x + x * thing.radius) * _OVERSAMPLING, (thing.y + y * thing.radius) * _OVERSAMPLING)
            for x, y in outline(thing.shape)
        ]
        pen.polygon(points, fill=COLOURS[thing.colour])
    return canvas.reduce(_OVERSAMPLING)


@cache
def outline(shape: str) -> tuple[tuple[float, float], ...]:
    """The polygon of a shape of radius 1 around the origin, y downwards."""
    if shape == "circle":
        return tuple((math.cos(a), math.sin(a)) for a in np.linspace(0, 2 * math.pi, 48, endpoint=False))
    if shape == "star":
        radii = [1.08 if i % 2 == 0 else 0.4 for i in range(10)]
        return tuple((r * math.sin(i * math.pi / 5), -r * math.cos(i * math.pi / 5)) for i, r in enumerate(radii))
    if shape == "cross":
        a = 0.34
        arm = ((-a, -1.0), (a, -1.0), (a, -a))
        quarters = ((1, 0, 0, 1), (0, -1, 1, 0), (-1, 0, 0, -1), (0, 1, -1, 0))
        return tuple((p * x + q * y, r * x + s * y) for p, q, r, s in quarters for x, y in arm)
    return {
        "square": ((-0.9, -0.9), (0.9, -0.9), (0.9, 0.9), (-0.9, 0.9)),
        "triangle": ((0.0, -1.0), (1.0, 0.85), (-1.0, 0.85)),
        "diamond": ((0.0, -1.1), (0.85, 0.0), (0.0, 1.1), (-0.85, 0.0)),
    }[shape]


@cache
def held_out_triples() -> frozenset[Triple]:
    """One in ten of all (shape, colour, background): no training scene has one, every evaluation scene has."""
    triples = [t for t in product(SHAPES, COLOURS, COLOURS) if t[1] != t[2]]
    order = np.random.default_rng(20).permutation(len(triples))
    return frozenset(triples[i] for i in order[: len(triples) // 10])


def sample_scene(rng: np.random.Generator, held_out: bool = False) -> Scene:
    """Half single objects, a fifth two or three alike, three tenths pairs; for training, or (`held_out`) evaluation."""
    while True:
        scene = _sample_any(rng)
        if held_out and not scene.says_background:
            continue  # "a red circle" has no right background to be judged by
        if bool(scene.triples() & held_out_triples()) == held_out:
            return scene


def crowd(rng: np.random.Generator) -> Scene:
    """Many objects anywhere, for an autoencoder: it learns from edges, and a captioned scene is mostly background."""
    background = str(rng.choice(list(COLOURS)))
    things = tuple(
        Thing(
            shape=str(rng.choice(SHAPES)),
            colour=str(rng.choice(list(COLOURS))),
            x=float(rng.uniform(6, SIZE - 6)),
            y=float(rng.uniform(6, SIZE - 6)),
            radius=float(rng.uniform(9, 18)),
        )
        for _ in range(6)
    )
    return Scene("crowd", background, things)


def _sample_any(rng: np.random.Generator) -> Scene:
    kind = str(rng.choice(["single", "count", "pair"], p=[0.5, 0.2, 0.3]))
    background, colour, other = (str(c) for c in rng.permutation(list(COLOURS))[:3])
    shape = str(rng.choice(SHAPES))
    if kind == "single":
        size = str(rng.choice(["", "large"], p=[0.8, 0.2]))
        position = "" if size == "large" or rng.random() < 0.35 else str(rng.choice(list(ANCHORS)))
        thing = _place(rng, shape, colour, ANCHORS[position or "centre"], SIZES[size], jitter=1.5 if position else 3.0)
        return Scene(kind, background, (thing,), size, position, says_background=bool(rng.random() > 0.08))
    if kind == "count":
        anchors = _GROUPS[int(rng.integers(2, 4))]
        return Scene(kind, background, tuple(_place(rng, shape, colour, a, _GROUP_RADIUS) for a in anchors))
    relation = str(rng.choice(RELATIONS))
    anchors = ((16, 32), (48, 32)) if relation in ("to the left of", "to the right of", "and") else ((32, 16), (32, 48))
    if relation in ("to the right of", "below"):
        anchors = anchors[::-1]
    things = (
        _place(rng, shape, colour, anchors[0], _GROUP_RADIUS),
        _place(rng, str(rng.choice(SHAPES)), other, anchors[1], _GROUP_RADIUS),
    )
    return Scene(kind, background, things, relation=relation)


def _place(
    rng: np.random.Generator,
    shape: str,
    colour: str,
    anchor: tuple[int, int],
    radius: tuple[float, float],
    jitter: float = 0.7,
) -> Thing:
    dx, dy = rng.uniform(-jitter, jitter, 2)
    return Thing(shape, colour, anchor[0] + dx, anchor[1] + dy, float(rng.uniform(*radius)))


def _noun(thing: Thing, size: str = "") -> str:
    words = f"{size} {thing.colour} {thing.shape}".strip()
    return f"{_article(words)} {words}"


def _article(words: str) -> str:
    return "an" if words.startswith("orange") else "a"
