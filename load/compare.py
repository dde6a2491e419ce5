"""Compares models under the same traffic, each on a fresh server, and writes load/results/NAME/.

    scripts/load compare --rate 0.5,1,2 --output-lengths exponential:32 --slo ttft=2s,itl_p99=500ms
    scripts/load compare --models llm_dynamic,llm,sdxl_unbatched,sdxl --concurrency 16 --requests 64 --name mine

It can be interrupted: the runs that are complete are kept and reported, and the same command with the same --name goes
on. With a --name that exists, models, rates and repeats may be added. Rates that a mode can't hold take their time:
every request is waited for.
"""

import argparse
import contextlib
import json
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from load import arrivals, drive, machine, report
from load.drive import Progress, RunFailed
from load.plan import Asked, Model, Run, by_server, plan
from load.samples import Kind
from load.server import ROOT, Addresses, Server, ServerError, StopError
from load.workload import Lengths

MODELS = "llm_unbatched,llm_static,llm_dynamic,llm"
# A comparison that goes on must not change these: its runs would not be of one kind.
FIXED = ("requests", "duration", "prompt_lengths", "workload", "sdxl_requests", "sdxl_steps", "seed", "protocol")

Serve = Callable[[str], AbstractContextManager[Addresses]]


@dataclass(frozen=True)
class Bench:
    """How one run is measured. Another one stands in for it in tests."""

    serve: Serve
    warm_up: Callable[[Run, Addresses], None]
    drive: Callable[[Run, Addresses, Path, Progress], None]


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="scripts/load compare", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--models", default=MODELS, help="the first of each kind is the yardstick (default: %(default)s)")
    made.add_argument("--rate", metavar="R,R", help="open loop: requests per second, Poisson")
    made.add_argument("--burstiness", type=float, help="with --rate: 1 is Poisson, less is burstier (vLLM's meaning)")
    made.add_argument("--arrivals", metavar="SPEC", action="append", default=[], help="open loop of another shape, such"
                      " as spike:0.5:4@30+10; may be given several times")  # fmt: skip
    made.add_argument("--concurrency", metavar="N,N", help="closed loop: users who ask again when they are answered")
    made.add_argument("--requests", type=int, help="of each run (default: 64); all modes get the same ones")
    made.add_argument("--duration", type=float, metavar="S", help="of the arrivals of each run, instead of --requests")
    made.add_argument("--repeats", type=int, default=1, help="models take turns (default: %(default)s)")
    made.add_argument("--prompt-lengths", default="uniform:16:64", metavar="SPEC", help="tokens (default: %(default)s)")
    made.add_argument("--output-lengths", default="exponential:32:256", metavar="SPEC,SPEC",
                      help="tokens; of several each one is measured (default: %(default)s)")  # fmt: skip
    made.add_argument("--workload", metavar="FILE.jsonl", help="prompts of your own, instead of the lengths")
    for flag, kind in (("rate", str), ("concurrency", str), ("requests", int), ("steps", int)):
        made.add_argument(f"--sdxl-{flag}", type=kind, help="of picture models (default: as above)"
                          if flag != "steps" else "of each picture (default: the model's own)")  # fmt: skip
    report.add_slos(made)
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("--protocol", choices=("grpc", "http"), default="grpc")
    made.add_argument("--users", type=int, help="of an open loop (default: one for each request)")
    made.add_argument("--limit", type=float, default=3600, help="seconds, then a run is given up (default: 3600)")
    made.add_argument("--url", metavar="HOST:GRPC,HTTP,METRICS", help="a server that runs and has all the models")
    made.add_argument("--model-repository", type=Path, help="another than ours")
    made.add_argument("--name", help="of the folder in load/results/ (default: scratch/ and the time)")
    return made


def numbers(text: str | None, field: str, kind: Callable[[str], Any]) -> list[Any]:
    """ValueError names the field and what is allowed."""
    try:
        found = [kind(part) for part in (text or "").split(",") if part]
    except ValueError:
        found = [0]
    if any(not number > 0 for number in found):
        raise ValueError(f"{field} is {text!r}; allowed: numbers above 0 with commas between")
    return found


def asked(args: argparse.Namespace) -> dict[Kind, Asked]:
    """ValueError says which argument is wrong."""
    for name, least in (("requests", 1), ("repeats", 1), ("sdxl_requests", 1), ("sdxl_steps", 1), ("users", 1)):
        if (value := getattr(args, name)) is not None and value < least:
            raise ValueError(f"{name} is {value}; allowed: at least {least}")

    def rates(text: str | None, field: str) -> list[str]:
        shape = "poisson:{:g}" if args.burstiness is None else f"gamma:{{:g}}:{args.burstiness:g}"
        return [shape.format(rate) for rate in numbers(text, field, float)]

    def users(text: str | None, field: str) -> tuple[int, ...]:
        return tuple(numbers(text, field, int))

    specs, concurrency = rates(args.rate, "rate") + args.arrivals, users(args.concurrency, "concurrency")
    if not specs and not concurrency:
        specs = rates("0.5,1,2", "rate")
    for spec in specs:
        arrivals.parse(spec)
    lengths = args.output_lengths.split(",")
    for spec in lengths:
        Lengths.parse(spec, "output_lengths")
    Lengths.parse(args.prompt_lengths, "prompt_lengths")
    texts = Asked(tuple(specs), concurrency, args.requests, args.duration, args.prompt_lengths, tuple(lengths))
    if args.workload:
        texts = Asked(tuple(specs), concurrency, args.requests, args.duration, None, (None,), None, args.workload)
    own = args.sdxl_rate or args.sdxl_concurrency
    pictures = Asked(
        tuple(rates(args.sdxl_rate, "sdxl_rate") if own else specs),
        users(args.sdxl_concurrency, "sdxl_concurrency") if own else concurrency,
        args.sdxl_requests or args.requests,
        args.duration,
        None,
        (None,),
        args.sdxl_steps,
    )
    return {"llm": texts, "sdxl": pictures}


def measure(runs: Sequence[Run], folder: Path, bench: Bench) -> dict[str, str]:
    """Measures what the folder has not yet. Returns why runs failed, by their keys.

    A failed run may leave the server with work that nobody waits for, so what follows gets a fresh one.
    """
    left = [run for run in runs if not (folder / report.RUNS / run.key / drive.RUN).exists()]
    failures: dict[str, str] = {}
    total = sum(run.traffic.requests for run in left)
    with tqdm(total=total, unit="req", mininterval=1, disable=not left, dynamic_ncols=True) as bar:
        for model, together in by_server(left):
            waiting = list(together)
            while waiting:
                try:
                    with bench.serve(model) as addresses:
                        bar.set_postfix_str(f"{model}: warm-up")
                        bench.warm_up(waiting[0], addresses)
                        while waiting:
                            run = waiting.pop(0)
                            bar.set_postfix_str(f"{run.key}")
                            try:
                                bench.drive(run, addresses, folder / report.RUNS / run.key, bar.update)
                            except RunFailed as error:
                                failures[run.key] = str(error)
                                bar.write(f"{run.key}: {error}", file=sys.stderr)
                                break
                except StopError as error:
                    bar.write(f"{model}: {error}", file=sys.stderr)
                except (ServerError, RunFailed) as error:  # it did not start, or failed at the warm-up
                    bar.write(f"{model}: {error}", file=sys.stderr)
                    failures |= {run.key: str(error).splitlines()[0] for run in waiting}
                    waiting = []
    return failures


def about(args: argparse.Namespace, folder: Path, models: Sequence[Model], left_out: list[str]) -> dict[str, Any]:
    """run.json. Of a comparison that goes on: with what it was before. ValueError if that doesn't fit."""
    arguments = {name: value if value is None else str(value) for name, value in vars(args).items()}
    file = folder / report.ABOUT
    command = "scripts/load compare " + shlex.join(args.command)
    known = [asdict(model) for model in models]
    if file.exists():
        before = json.loads(file.read_text())
        for name in FIXED:
            if (was := before["arguments"].get(name)) != arguments[name]:
                raise ValueError(
                    f"{name} is {arguments[name]}, but {folder.name} was measured with {was}; allowed: the same, or "
                    "another --name"
                )
        names = {model.name for model in models}
        made = dict(before)
        made["models"] = known + [model for model in before["models"] if model["name"] not in names]
        made["commands"] = list(dict.fromkeys([*before["commands"], command]))
        made["left_out"] = list(dict.fromkeys([*before["left_out"], *left_out]))
    else:
        made = {"started": time.strftime("%Y-%m-%d %H:%M:%S %z"), "commands": [command], "left_out": left_out}
        made |= {"machine": machine.describe(), "versions": machine.versions(), "commit": machine.commit()}
        made["models"] = known
    arguments.pop("command")
    return made | {"arguments": arguments}


def find_models(names: list[str], repository: Path, addresses: Addresses | None) -> list[Model]:
    """Of a running server as it says itself. ValueError if one isn't there."""
    if addresses is None:
        return [Model.from_repository(repository, name) for name in names]
    import tritonclient.grpc

    with tritonclient.grpc.InferenceServerClient(addresses.grpc) as client:
        try:
            return [Model.from_config(name, client.get_model_config(name).config) for name in names]
        except tritonclient.grpc.InferenceServerException as error:
            raise ValueError(f"{addresses.grpc}: {error.message()}") from error


def triton_bench(args: argparse.Namespace, folder: Path, models: Sequence[Model], addresses: Addresses | None) -> Bench:
    seats = {model.name: model.seats for model in models}

    @contextlib.contextmanager
    def serve(model: str) -> Iterator[Addresses]:
        if addresses:
            yield addresses
            return
        server = Server([model], folder / f"{model}.log", args.model_repository)
        with server as started:
            yield started
        (folder / f"{model}.log").unlink()  # kept only while it may have something to say

    def warm_up(run: Run, where: Addresses) -> None:
        drive.warm_up(run, where, folder, args.protocol, seats[run.model] or 8)

    def driven(run: Run, where: Addresses, target: Path, progress: Progress) -> None:
        drive.drive(run, where, target, args.protocol, args.users, args.limit, progress)

    return Bench(serve, warm_up, driven)


def main(argv: list[str]) -> int:
    command_line = parser()
    args = command_line.parse_args(argv)
    args.command = argv
    folder = report.RESULTS / (args.name or time.strftime("scratch/%Y-%m-%d_%H-%M-%S"))
    try:
        addresses = Addresses.parse(args.url) if args.url else None
        names = [name for name in args.models.split(",") if name]
        models = find_models(names, args.model_repository or ROOT / "model_repository", addresses)
        planned = plan(models, asked(args), args.repeats, args.seed)
        description = about(args, folder, models, planned.left_out)
    except ValueError as error:
        command_line.error(str(error))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / report.ABOUT).write_text(json.dumps(description, indent=2) + "\n")
    for sentence in planned.left_out:
        print(f"left out: {sentence}", file=sys.stderr)
    failures: dict[str, str] = {}
    interrupted = False
    try:
        failures = measure(planned.runs, folder, triton_bench(args, folder, models, addresses))
    except KeyboardInterrupt:
        interrupted = True
        again = shlex.join([*argv, *([] if args.name else ["--name", str(folder.relative_to(report.RESULTS))])])
        print(f"interrupted; to go on: scripts/load compare {again}", file=sys.stderr)
    (folder / report.FAILURES).write_text(json.dumps(failures, indent=2) + "\n")
    print(report.write(folder, report.slos_of(args)))
    print(f"written: {folder}", file=sys.stderr)
    return 130 if interrupted else 1 if failures else 0
