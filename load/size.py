"""How many servers a load needs under an SLO, by simulation (load/queueing.py).

    .venv/bin/python -m load.size --curve ROWS:MS,ROWS:MS,... --arrivals poisson:4 --slo ttft_p99=1s,itl_p99=200ms

The curve is what one pass over the weights takes by how many rows (tokens, or pictures) are in it. For a language model
load/engine_speed.py prints it, for pictures `sdxl:step_seconds` on the metrics page has it, one batch size at a time.

What isn't simulated: KV blocks that run out, prefix caching, clients, the network, a machine that is shared. Real
servers are slower for that, so this says how many are needed at least. Latencies that grow with --requests belong to
a load that so many servers can't take.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence

from load import arrivals
from load.figures import Figures, summarise
from load.queueing import Continuous, Curve, Dynamic, Outcome, Server, make_jobs, simulate
from load.slo import Slo
from load.workload import Lengths


def figures(outcome: Outcome, slo: Slo | None) -> Figures:
    """Without the first tenth of the requests, which met with empty servers."""
    return summarise(outcome.samples[len(outcome.samples) // 10 :], slo)


def rows(args: argparse.Namespace) -> Iterator[list[str]]:
    """One for each number of servers, up to the first that keeps to the SLO, or to all that are asked for."""
    traffic, slo = arrivals.parse(args.arrivals), Slo.parse(args.slo) if args.slo else None
    curve, prompts, outputs = Curve.parse(args.curve), None, None
    if args.kind == "llm":
        prompts = Lengths.parse(args.prompt_lengths, "prompt_lengths")
        outputs = Lengths.parse(args.output_lengths, "output_lengths")
    for count in range(args.least, args.most + 1):
        servers: list[Server]
        if args.kind == "llm":
            servers = [Continuous(curve, args.seats or 64, args.budget) for _ in range(count)]
        else:
            servers = [Dynamic(curve, args.seats or 16, args.delay / 1000, args.steps) for _ in range(count)]
        outcome = simulate(
            servers, make_jobs(traffic, args.requests, args.seed, prompts, outputs), args.kind, args.seed
        )
        made = figures(outcome, slo)
        spreads = [(made.ttft, "p50"), (made.ttft, "p99"), (made.itl, "p99"), (made.e2el, "p50"), (made.e2el, "p99")]
        cells = [f"{getattr(spread, name):.3g}" if spread else "-" for spread, name in spreads]
        holds = "-" if made.slo_holds is None else "yes" if made.slo_holds else "no"
        yield [str(count), f"{outcome.busy:.0%}", *cells, holds]
        if made.slo_holds:
            return


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", choices=["llm", "sdxl"], default="llm")
    parser.add_argument("--curve", required=True, help="ROWS:MILLISECONDS,... of one step, rising")
    parser.add_argument("--arrivals", required=True, help=arrivals.FORMS.replace("%", "%%"))
    parser.add_argument("--requests", type=int, default=4000, help="how many arrive (default: %(default)s)")
    parser.add_argument("--slo", default="", help="as in ttft_p99=500ms,itl_p99=100ms,e2e_p99=2s")
    parser.add_argument("--least", type=int, default=1, help="servers to begin with (default: %(default)s)")
    parser.add_argument("--most", type=int, default=16, help="servers at most (default: %(default)s)")
    parser.add_argument("--seats", type=int, default=0, help="max_num_seqs or max_batch_size (default: 64 or 16)")
    parser.add_argument("--seed", type=int, default=0)
    text = parser.add_argument_group("llm")
    text.add_argument("--budget", type=int, default=512, help="max_num_batched_tokens (default: %(default)s)")
    text.add_argument("--prompt-lengths", default="uniform:8:64", help="in tokens (default: %(default)s)")
    text.add_argument("--output-lengths", default="exponential:32", help="in tokens (default: %(default)s)")
    picture = parser.add_argument_group("sdxl")
    picture.add_argument("--delay", type=float, default=100, help="max_queue_delay, in ms (default: %(default)s)")
    picture.add_argument("--steps", type=int, default=30, help="denoising steps of a picture (default: %(default)s)")
    args = parser.parse_args(argv)
    print("| servers | busy | TTFT p50 s | p99 | ITL p99 s | E2EL p50 s | p99 | SLO holds |\n" + "|---" * 8 + "|")
    try:
        for row in rows(args):
            print("| " + " | ".join(row) + " |", flush=True)
    except ValueError as error:
        parser.error(str(error))
    return 0


if __name__ == "__main__":
    sys.exit(main())
