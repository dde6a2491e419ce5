"""The shape world: captions say what the pictures show, and the judge sees it."""

import dataclasses

import numpy as np
import pytest

from training.judge import judge, look
from training.shapes import COLOURS, SHAPES, Scene, Thing, caption, draw, held_out_triples, sample_scene


def scenes(count: int, held_out: bool = False, seed: int = 0) -> list[Scene]:
    rng = np.random.default_rng(seed)
    return [sample_scene(rng, held_out) for _ in range(count)]


def test_the_judge_is_right_about_drawn_scenes() -> None:
    right = [judge(draw(scene), scene).everything for scene in scenes(400)]
    assert np.mean(right) >= 0.99


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("colour", COLOURS)
def test_the_judge_knows_every_shape_in_every_colour(shape: str, colour: str) -> None:
    for background in COLOURS:
        if background != colour:
            seen = look(draw(Scene("single", background, (Thing(shape, colour, 30, 34, 13),))))
            assert (seen[0], [(t.shape, t.colour) for t in seen[1]]) == (background, [(shape, colour)])


def test_the_judge_rejects_a_picture_of_another_scene() -> None:
    drawn = scenes(60)
    for scene, other in zip(drawn, drawn[1:] + drawn[:1], strict=True):
        if caption(scene) != caption(other):
            assert not judge(draw(other), scene).everything


def test_the_judge_sees_each_kind_of_mistake() -> None:
    pair = Scene(
        "pair",
        "white",
        (Thing("circle", "red", 16, 32, 11), Thing("star", "blue", 48, 32, 11)),
        relation="to the left of",
    )
    a, b = pair.things
    assert judge(draw(pair), pair).everything
    cases = {
        "background": dataclasses.replace(pair, background="yellow"),
        "colours": dataclasses.replace(pair, things=(dataclasses.replace(a, colour="green"), b)),
        "count": dataclasses.replace(pair, things=(a,)),
        "shapes": dataclasses.replace(pair, things=(dataclasses.replace(a, shape="square"), b)),
        "placed": dataclasses.replace(pair, things=(dataclasses.replace(a, x=48), dataclasses.replace(b, x=16))),
    }
    for aspect, wrong in cases.items():
        assert not getattr(judge(draw(wrong), pair), aspect), aspect


def test_training_never_shows_what_is_held_out_and_evaluation_always_does() -> None:
    held_out = held_out_triples()
    assert len(held_out) == len(SHAPES) * len(COLOURS) * (len(COLOURS) - 1) // 10
    assert all(not scene.triples() & held_out for scene in scenes(500))
    assert all(scene.triples() & held_out for scene in scenes(100, held_out=True))


def test_no_evaluation_caption_is_a_training_caption() -> None:
    assert not {caption(scene) for scene in scenes(3000)} & {caption(scene) for scene in scenes(300, held_out=True)}


def test_captions_read_as_english() -> None:
    star, cross = Thing("star", "orange", 0, 0, 1), Thing("cross", "red", 0, 0, 1)
    cases = {
        "an orange star at the top left on a blue background": Scene("single", "blue", (star,), position="top left"),
        "a small orange star in the centre on an orange background": Scene(
            "single", "orange", (star,), size="small", position="centre"
        ),
        "three red crosses on a white background": Scene("count", "white", (cross,) * 3),
        "an orange star above a red cross on a white background": Scene(
            "pair", "white", (star, cross), relation="above"
        ),
        "a red cross": Scene("single", "white", (cross,), says_background=False),
    }
    for words, scene in cases.items():
        assert caption(scene) == words
