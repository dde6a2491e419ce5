"""Searches the settings of a model with the highest goodput under an SLO on this machine, and prints what to paste.

    scripts/load advise --model llm --slo ttft_p99=500ms,itl_p99=100ms --arrivals poisson:2
    scripts/load advise --model sdxl --slo e2e_p99=2s --arrivals poisson:1

Of a model with continuous batching it searches max_num_seqs, of one with Triton's batches preferred_batch_size and
max_queue_delay_microseconds. Each setting gets a fresh server and the same requests; the model's own folder stays as it
is. It can be interrupted: then it advises by what it has measured.
"""

import argparse
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tqdm import tqdm

from load import arrivals, batches, drive, samples, settings
from load.compare import numbers
from load.drive import RunFailed
from load.figures import summarise
from load.plan import Asked, Model, Run, run_seed
from load.report import RESULTS
from load.search import Measure, Outcome, search
from load.server import ROOT, Server, ServerError, StopError
from load.slo import Slo
from load.table import Table, number
from load.workload import Lengths


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="scripts/load advise", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--model", default="llm")
    made.add_argument("--slo", type=Slo.parse, required=True, help="such as ttft_p99=500ms,itl_p99=100ms or e2e_p99=2s")
    made.add_argument("--arrivals", metavar="SPEC", required=True, help="the traffic to expect, such as poisson:2; "
                      "best near what the machine can do, for below that all settings keep up")  # fmt: skip
    made.add_argument("--requests", type=int, default=64, help="of each run (default: %(default)s)")
    made.add_argument("--prompt-lengths", default="uniform:16:64", metavar="SPEC", help="(default: %(default)s)")
    made.add_argument("--output-lengths", default="exponential:32:256", metavar="SPEC", help="(default: %(default)s)")
    made.add_argument("--workload", metavar="FILE.jsonl", help="prompts of your own, instead of the lengths")
    made.add_argument("--sdxl-steps", type=int, help="of each picture (default: the model's own)")
    made.add_argument("--budget", type=int, default=12, help="settings to measure at most (default: %(default)s)")
    made.add_argument("--sizes", metavar="N,N", help="values of max_num_seqs or preferred_batch_size to choose from")
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("--protocol", choices=("grpc", "http"), default="grpc")
    made.add_argument("--limit", type=float, default=1800, help="seconds, then a run is given up (default: 1800)")
    made.add_argument("--model-repository", type=Path, default=ROOT / "model_repository", help="another than ours")
    made.add_argument("--name", help="of the folder in load/results/ for the raw samples; one that is there goes on"
                      " (default: scratch/advise- and the time)")  # fmt: skip
    return made


def run_of(args: argparse.Namespace, model: Model) -> Run:
    """ValueError says which argument is wrong."""
    for name in ("requests", "budget"):
        if getattr(args, name) < 1:
            raise ValueError(f"{name} is {getattr(args, name)}; allowed: at least 1")
    arrivals.parse(args.arrivals)
    Lengths.parse(args.prompt_lengths, "prompt_lengths")
    Lengths.parse(args.output_lengths, "output_lengths")
    own = model.kind == "llm" and not args.workload
    asked = Asked(
        arrivals=(args.arrivals,),
        concurrency=(),
        requests=args.requests,
        duration=None,
        prompt_lengths=args.prompt_lengths if own else None,
        output_lengths=(args.output_lengths if own else None,),
        steps=args.sdxl_steps if model.kind == "sdxl" else None,
        workload=args.workload,
    )
    (traffic,) = asked.traffics([], args.seed)
    return Run(model.name, model.kind, traffic, 0, run_seed(args.seed, traffic, 0))


def triton_measure(args: argparse.Namespace, run: Run, folder: Path) -> Measure:
    """Measures a setting on a server of its own, unless the folder has it already."""

    def measure(setting: dict[str, int]) -> Outcome:
        name = ",".join(f"{key}={value}" for key, value in setting.items())
        target = folder / "runs" / name
        about = target / drive.RUN
        if not (about.exists() and drive.stored(about) == run):
            shutil.rmtree(target, ignore_errors=True)  # of other requests than these
            try:
                _measure(args, run, setting, target)
            except (ServerError, RunFailed) as error:
                if not about.exists():
                    return Outcome(setting, failure=str(error).splitlines()[0])
        return outcome(setting, args.slo, run, target)

    return measure


def _measure(args: argparse.Namespace, run: Run, setting: dict[str, int], target: Path) -> None:
    size = setting.get(settings.BATCH, 8)
    name = f"{target.name:45}"
    with (
        tempfile.TemporaryDirectory(prefix="advise-") as repository,
        tqdm(total=run.traffic.requests, desc=name, unit="req", mininterval=1, dynamic_ncols=True) as bar,
    ):
        settings.copy_with(setting, args.model_repository / run.model, Path(repository))
        log = target.parent.parent / "server.log"
        try:
            with Server([run.model], log, Path(repository)) as addresses:
                drive.warm_up(run, addresses, target.parent, args.protocol, size)
                drive.drive(run, addresses, target, args.protocol, None, args.limit, bar.update)
        except StopError as error:
            bar.write(str(error), file=sys.stderr)


def outcome(setting: dict[str, int], slo: Slo, run: Run, folder: Path) -> Outcome:
    taken = samples.read(folder / drive.SAMPLES)
    figures = summarise(taken, slo)
    return Outcome(
        setting=setting,
        goodput=figures.goodput or 0.0,
        holds=bool(figures.slo_holds),
        throughput=figures.output_tokens_per_second if run.kind == "llm" else figures.images_per_second,
        observed=tuple(slo.observed(taken).items()),
        e2el_p99=figures.e2el.p99 if figures.e2el else float("inf"),
        mean_batch=batches.mean_batch(batches.read(folder / drive.METRICS), run.kind),
    )


def evidence(outcomes: Sequence[Outcome], kind: str) -> Table:
    """Best first."""
    ranked = sorted(outcomes, key=lambda one: one.merit, reverse=True)
    settings_of = list(ranked[0].setting)
    limits = list(dict.fromkeys(name for one in ranked for name, _ in one.observed))
    header = [*settings_of, "goodput req/s", "SLO", *(f"{name} ms" for name in limits), "E2EL p99 s"]
    header += ["tokens/s" if kind == "llm" else "images/s", "mean batch"]
    lines = []
    for one in ranked:
        values = [str(one.setting[name]) for name in settings_of]
        if one.failure:
            lines.append([*values, "failed", *[""] * (len(header) - len(values) - 1)])
            continue
        observed = dict(one.observed)
        times = [observed.get(name) for name in limits]
        shown = [number(None if time is None else time * 1000) for time in times]
        values += [number(one.goodput), "holds" if one.holds else "broken", *shown, number(one.e2el_p99)]
        lines.append([*values, number(one.throughput), number(one.mean_batch)])
    return Table(header, lines)


def advice(outcomes: Sequence[Outcome], run: Run, slo: Slo, model: Path) -> str:
    """What to paste, and why."""
    measured = [one for one in outcomes if not one.failure]
    parts = [evidence(outcomes, run.kind).markdown()] if outcomes else []
    parts += [f"{one.setting}: {one.failure}\n" for one in outcomes if one.failure]
    if not measured:
        return "\n".join([*parts, "No setting was measured: there is nothing to advise.\n"])
    best = max(measured, key=lambda one: one.merit)
    said = f"Under {run.traffic.label} and {slo}, the best of {len(measured)} settings kept {number(best.goodput)}"
    parts.append(f"{said} requests per second within it.")
    if best.goodput == 0:
        parts.append("That is none: no setting can keep to this SLO here. Allow more time, or send less.")
    elif not best.holds:
        parts.append("The run as a whole broke the SLO: this is the best that can be had, not what was asked for.")
    else:
        # The same goodput everywhere means that the settings made no difference.
        equals = [one for one in measured if one.merit[:2] == best.merit[:2]]
        if len(equals) == len(measured) > 1:
            parts.append("All settings kept up: at this traffic they differ in latency only. Ask again with more.")
    parts.append(f"\nPaste into {settings.to_paste(best.setting, model)}")
    return "\n".join(parts)


def main(argv: list[str]) -> int:
    command_line = parser()
    args = command_line.parse_args(argv)
    folder = RESULTS / (args.name or time.strftime("scratch/advise-%Y-%m-%d_%H-%M-%S"))
    try:
        model = Model.from_repository(args.model_repository, args.model)
        run = run_of(args, model)
        space = settings.space(model)
        if args.sizes:
            space[next(iter(space))] = sorted(set(numbers(args.sizes, "sizes", int)))
    except ValueError as error:
        command_line.error(str(error))
    (folder / "runs").mkdir(parents=True, exist_ok=True)
    outcomes: list[Outcome] = []
    interrupted = False
    try:
        for one in search(space, triton_measure(args, run, folder), args.budget):
            outcomes.append(one)
    except KeyboardInterrupt:
        interrupted = True
        print("interrupted; this is what is known by now", file=sys.stderr)
    text = advice(outcomes, run, args.slo, args.model_repository / model.name)
    (folder / "advice.md").write_text(text)
    print(text)
    return 130 if interrupted else 0 if any(not one.failure for one in outcomes) else 1
