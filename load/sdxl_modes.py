"""What the mode `exact` costs: seconds for 1, 4 and 16 pictures in one batch, in both modes, without a server.

python load/sdxl_modes.py [MODEL FOLDER]
"""

import statistics
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "backends" / "sdxl"))

from pipeline.config import PipelineConfig  # noqa: E402
from pipeline.loader import load_parts  # noqa: E402
from pipeline.pipeline import Picture, Pipeline  # noqa: E402
from pipeline.request import parse  # noqa: E402
from pipeline.trajectory import Job  # noqa: E402

STEPS, ROUNDS, COUNTS = 20, 3, (1, 4, 16)


def seconds(pipeline: Pipeline, count: int) -> float:
    parameters = {"steps": STEPS, "seed": 0}
    requests = parse(
        ["a red circle on a blue background"] * count, None, parameters, pipeline.config, pipeline.parts.sizes
    )
    began = time.perf_counter()
    outcomes = list(pipeline.run([Job(request) for request in requests]))
    took = time.perf_counter() - began
    assert all(isinstance(outcome, Picture) for _, outcome in outcomes), outcomes
    return took


def main() -> None:
    model = sys.argv[1] if len(sys.argv) > 1 else str(ROOT / "models" / "tiny-sdxl")
    parts = load_parts(PipelineConfig(model))
    pipelines = {mode: Pipeline(PipelineConfig(model, mode=mode), parts) for mode in ("fast", "exact")}
    for pipeline in pipelines.values():
        seconds(pipeline, 1)
    print(f"{STEPS} steps, guided, {parts.device}; median of {ROUNDS}, the modes in turns")
    for count in COUNTS:
        took = {mode: [0.0] * ROUNDS for mode in pipelines}
        for i in range(ROUNDS):
            for mode, pipeline in pipelines.items():
                took[mode][i] = seconds(pipeline, count)
        fast, exact = (statistics.median(took[mode]) for mode in ("fast", "exact"))
        print(f"{count:3} pictures: fast {fast:6.2f} s, exact {exact:6.2f} s, {exact / fast:5.2f} times")


if __name__ == "__main__":
    main()
