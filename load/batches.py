"""What Triton's own metrics say of a run's batches: how large they were, and how long requests waited for one."""

import itertools
import json
from collections.abc import Sequence
from pathlib import Path

from load.samples import Kind

Reading = dict[str, float]  # "time" and metrics by name, as load/metrics_page.py writes them

# Of each kind: what was done, and in how many passes. Triton's own counters see one execution for each request of a
# decoupled backend that makes its batches itself.
DONE_AND_PASSES: dict[Kind, tuple[str, str]] = {
    "llm": ("vllm:generation_tokens_total", "llm:steps_total"),
    "sdxl": ("nv_inference_count", "nv_inference_exec_count"),
}


def read(path: Path) -> list[Reading]:
    """The lines of a metrics.jsonl; none if there is no such file. What a killed writer left of a last line is none."""
    if not path.exists():
        return []
    whole = path.read_text(encoding="utf-8").rpartition("\n")[0]
    return [json.loads(line) for line in whole.splitlines()]


def mean_batch(readings: Sequence[Reading], kind: Kind) -> float | None:
    """Requests of a pass, on average; None if nothing ran or the server doesn't say."""
    return _ratio(readings, *DONE_AND_PASSES[kind])


def queue_seconds(readings: Sequence[Reading]) -> float | None:
    """Mean seconds that a request waited in Triton's queue. What a backend queues itself is not in it."""
    microseconds = _ratio(readings, "nv_inference_queue_duration_us", "nv_inference_count")
    return None if microseconds is None else microseconds / 1e6


def over_time(readings: Sequence[Reading], kind: Kind, seconds: float = 1.0) -> list[tuple[float, float]]:
    """(time, mean batch since the time before), at least `seconds` apart; 0 where no pass was made."""
    done, passes = DONE_AND_PASSES[kind]
    known = [reading for reading in readings if done in reading and passes in reading]
    points: list[tuple[float, float]] = []
    if not known:
        return points
    last = known[0]
    for reading in known[1:]:
        if reading["time"] - last["time"] >= seconds:
            made = reading[passes] - last[passes]
            points.append((reading["time"], (reading[done] - last[done]) / made if made > 0 else 0.0))
            last = reading
    return points


def _ratio(readings: Sequence[Reading], upper: str, lower: str) -> float | None:
    known = [reading for reading in readings if upper in reading and lower in reading]
    # A server that was restarted half-way would count from 0 again.
    if len(known) < 2 or any(later[lower] < earlier[lower] for earlier, later in itertools.pairwise(known)):
        return None
    count = known[-1][lower] - known[0][lower]
    return (known[-1][upper] - known[0][upper]) / count if count > 0 else None
