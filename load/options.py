"""What Locust's command line and web page say of a run, beside Locust's own options."""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

from load import arrivals, workload
from load.slo import Slo
from load.workload import Lengths, Work


@dataclass(frozen=True)
class Options:
    model: str
    arrivals: arrivals.Arrivals | None  # None: closed loop
    requests: int | None  # in all; None: no limit
    seed: int
    prompt_lengths: Lengths
    output_lengths: Lengths
    works: list[Work] | None  # of the user's file; None: seeded ones
    sdxl_steps: int | None
    warm_up: int
    request_timeout: float
    samples: str | None
    slo: Slo | None
    metrics_url: str | None
    metrics: str

    @classmethod
    def of(cls, given: Any, kind: str) -> Self:
        """given: Locust's parsed options. ValueError or OSError says what is wrong with one of them."""
        return cls(
            model=given.model or kind,
            arrivals=arrivals.parse(given.arrivals) if given.arrivals else None,
            requests=given.requests or None,
            seed=given.seed,
            prompt_lengths=Lengths.parse(given.prompt_lengths, "prompt_lengths"),
            output_lengths=Lengths.parse(given.output_lengths, "output_lengths"),
            works=workload.from_jsonl(given.workload) if given.workload else None,
            sdxl_steps=given.sdxl_steps or None,
            warm_up=given.warm_up,
            request_timeout=given.request_timeout,
            samples=given.samples or None,
            slo=Slo.parse(given.slo) if given.slo else None,
            metrics_url=given.metrics_url or None,
            metrics=given.metrics,
        )

    def work(self, index: int, kind: str) -> Work:
        """What the request of this index asks for. A file that is shorter than the run starts again."""
        if self.works is not None:
            return self.works[index % len(self.works)]
        if kind == "llm":
            return workload.llm_work(index, self.seed, self.prompt_lengths, self.output_lengths)
        return workload.sdxl_work(index, self.seed, self.sdxl_steps)


def add_to(parser: Any) -> None:
    """parser: Locust's. Values stay plain text and numbers, for Locust sends them to its workers and its web page."""
    parser.add_argument("--model", default="", help="name on the server (default: llm or sdxl, as the user class)")
    parser.add_argument(
        "--arrivals",
        default="",
        type=_checked(arrivals.parse),
        help="open loop: " + arrivals.FORMS.replace("%", "%%") + "; empty: closed loop, each user asks again at once",
    )
    parser.add_argument(
        "--requests", default=0, type=_at_least(0), help="how many in all; 0: until --run-time, or stopped"
    )
    parser.add_argument("--seed", default=0, type=int, help="of arrivals, prompts and lengths")
    parser.add_argument(
        "--prompt-lengths",
        default="uniform:8:64",
        type=_checked(lambda spec: Lengths.parse(spec, "prompt_lengths")),
        help=f"in words: {workload.FORMS} (default: %(default)s)",
    )
    parser.add_argument(
        "--output-lengths",
        default="exponential:32",
        type=_checked(lambda spec: Lengths.parse(spec, "output_lengths")),
        help="in tokens: as above (default: %(default)s)",
    )
    parser.add_argument(
        "--workload",
        default="",
        type=_checked(workload.from_jsonl),
        help='file with a request a line instead: {"prompt": TEXT, "max_tokens" or "steps" and "seed": NUMBER}',
    )
    parser.add_argument("--sdxl-steps", default=0, type=_at_least(0), help="0: what the model does by default")
    parser.add_argument("--warm-up", default=0, type=_at_least(0), help="requests of each process before the start")
    parser.add_argument(
        "--request-timeout", default=600.0, type=float, help="seconds until a request has failed (default: %(default)s)"
    )
    parser.add_argument("--samples", default="", help="file for the raw samples, JSON lines; of all processes")
    parser.add_argument(
        "--slo", default="", type=_checked(Slo.parse), help="for goodput, as in ttft=500ms,itl_p99=100ms,e2e_p99=2s"
    )
    parser.add_argument(
        "--metrics-url", default="", help="host:port of Triton's metrics, to keep them beside the samples"
    )
    parser.add_argument("--metrics", default="metrics.jsonl", help="file for them (default: %(default)s)")


def _checked(parse: Callable[[str], object]) -> Callable[[str], str]:
    """The text itself, once it is known to be right."""

    def check(text: str) -> str:
        try:
            if text:
                parse(text)
        except (ValueError, OSError) as error:
            raise argparse.ArgumentTypeError(str(error)) from error
        return text

    return check


def _at_least(least: int) -> Callable[[str], int]:
    def check(text: str) -> int:
        if not text.removeprefix("-").isdigit() or int(text) < least:
            raise argparse.ArgumentTypeError(f"is {text!r}; allowed: a whole number of at least {least}")
        return int(text)

    return check
