"""What requests ask for: prompts and output lengths from seeded distributions, or a file of the user's.

Lengths, in tokens:

    fixed:N
    uniform:A:B               every whole number from A to B equally often
    exponential:MEAN[:MAX]    many short ones and a few long ones; above MAX they are MAX
    sharegpt[:MEAN]           like conversations people shared: lognormal with the mean that the vLLM paper gives for
                              ShareGPT (161 in, 338 out; arXiv 2309.06180, figure 11), unless MEAN is stated. Its spread
                              is not given there: sigma is 1 here. From 1 to 2048.

The works of a run follow from its seed and each one's index alone, so any process can make any of them.
"""

import json
import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

# Common words that are one token each, after a space, in most vocabularies. The server reports the true count.
WORDS = (  # noqa: SIM905  (a list of 104 strings is no easier to read)
    "time year people way day man thing woman life child world school state family student group country problem hand "
    "part place case week company system program question work government number night point home water room mother "
    "area money story fact month lot right study book eye job word business issue side kind head house service friend "
    "father power hour game line end member law car city name president team minute idea body information back parent "
    "face level office door health person art war history party result change morning reason research girl guy moment "
    "air teacher force education"
).split()
PICTURES = tuple(
    f"a {colour} {shape} on a {background} background"
    for colour, background in (("red", "blue"), ("yellow", "green"), ("white", "purple"), ("black", "white"))
    for shape in ("circle", "square", "star", "cross")
)
SHAREGPT_MEANS = {"prompt_lengths": 161.0, "output_lengths": 338.0}
SHAREGPT_SIGMA, SHAREGPT_MAX = 1.0, 2048
FORMS = "fixed:N, uniform:A:B with A up to B, exponential:MEAN[:MAX] or sharegpt[:MEAN] with numbers of at least 1"


@dataclass(frozen=True)
class Work:
    """What one request asks for."""

    prompt: str
    max_tokens: int | None = None  # of a text
    steps: int | None = None  # of a picture; None: what the model does by default
    seed: int | None = None  # of a picture


@dataclass(frozen=True)
class Lengths:
    spec: str
    draw: Callable[[random.Random], int]

    @classmethod
    def parse(cls, spec: str, field: str = "output_lengths") -> Self:
        """field: prompt_lengths or output_lengths. ValueError names it, the spec and what is allowed."""
        form, *texts = spec.split(":")
        try:
            match form, [float(text) for text in texts]:
                case "fixed", [number] if _whole(number):
                    return cls(spec, lambda _: int(number))
                case "uniform", [low, high] if _whole(low) and _whole(high) and low <= high:
                    return cls(spec, lambda rng: rng.randint(int(low), int(high)))
                case "exponential", [mean, *limit] if 1 <= mean < math.inf and (not limit or _whole(*limit)):
                    longest = int(limit[0]) if limit else None
                    return cls(spec, lambda rng: _clip(rng.expovariate(1 / mean), longest))
                case "sharegpt", [] | [_] as given if not given or 1 <= given[0] < math.inf:
                    mean = given[0] if given else SHAREGPT_MEANS[field]
                    mu = math.log(mean) - SHAREGPT_SIGMA**2 / 2  # the mean of a lognormal is exp(mu + sigma^2 / 2)
                    return cls(spec, lambda rng: _clip(rng.lognormvariate(mu, SHAREGPT_SIGMA), SHAREGPT_MAX))
        except (ValueError, TypeError):
            pass
        raise ValueError(f"{field} is {spec!r}; allowed: {FORMS}")


def llm_work(index: int, seed: int, prompt_lengths: Lengths, output_lengths: Lengths) -> Work:
    rng = random.Random(f"llm/{seed}/{index}")
    words = rng.choices(WORDS, k=prompt_lengths.draw(rng))
    return Work(" ".join(words), max_tokens=output_lengths.draw(rng))


def sdxl_work(index: int, seed: int, steps: int | None) -> Work:
    rng = random.Random(f"sdxl/{seed}/{index}")
    return Work(rng.choice(PICTURES), steps=steps, seed=rng.randrange(2**31))


def llm_works(count: int, seed: int, prompt_lengths: Lengths, output_lengths: Lengths) -> list[Work]:
    return [llm_work(index, seed, prompt_lengths, output_lengths) for index in range(count)]


def sdxl_works(count: int, seed: int, steps: int | None) -> list[Work]:
    return [sdxl_work(index, seed, steps) for index in range(count)]


def from_jsonl(path: Path | str) -> list[Work]:
    """One object a line: {"prompt": TEXT} and, each if wanted, "max_tokens", "steps" and "seed"."""
    works = []
    for number, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), start=1):
        if line.strip():
            try:
                works.append(_from_object(json.loads(line)))
            except ValueError as error:
                raise ValueError(f"{path}, line {number}: {error}") from error
    if not works:
        raise ValueError(f"{path} holds no work; allowed: at least one line")
    return works


def _from_object(given: Any) -> Work:
    if not isinstance(given, dict) or not isinstance(given.get("prompt"), str):
        raise ValueError('allowed: an object with a "prompt" that is a string')
    if unknown := given.keys() - {"prompt", "max_tokens", "steps", "seed"}:
        raise ValueError(f"{', '.join(sorted(unknown))} is unknown; allowed: prompt, max_tokens, steps, seed")
    for name, least in (("max_tokens", 1), ("steps", 1), ("seed", 0)):
        value = given.get(name)
        if value is not None and (type(value) is not int or value < least):
            raise ValueError(f"{name} is {value!r}; allowed: a whole number of at least {least}")
    return Work(**given)


def _whole(number: float) -> bool:
    return number >= 1 and number.is_integer()


def _clip(length: float, longest: int | None) -> int:
    rounded = max(1, round(length))
    return rounded if longest is None else min(rounded, longest)
