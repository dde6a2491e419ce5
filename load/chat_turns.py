"""What the prefix cache is worth: TTFT of each turn of a conversation, with and without it, by the engine alone.

    .venv/bin/python load/chat_turns.py --turns 5

Each turn asks with all that was said before and `--message` new tokens; its answer is `--answer` tokens long. Runs with
the cache and without it alternate; each round is another conversation, and the median of the rounds counts.
"""

import argparse
import random
import statistics
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "backends" / "llm")]

from engine.block_pool import BlockPool  # noqa: E402
from engine.model_runner import ModelRunner  # noqa: E402
from engine.sampling_params import SamplingParams  # noqa: E402
from engine.scheduler import Limits, Scheduler  # noqa: E402
from engine.sequence import Sequence  # noqa: E402

from load.engine_speed import SETTINGS, runner_for  # noqa: E402


def conversation(
    runner: ModelRunner, seed: int, turns: int, message: int, answer: int, *, cached: bool
) -> list[tuple[int, float]]:
    """Of each turn: its prompt's tokens, and the seconds until its first token."""
    rng = random.Random(seed)
    limits = Limits(1, 512, 8192, prefix_caching=cached)
    scheduler = Scheduler(BlockPool(runner.num_blocks, runner.block_size), limits)
    params = SamplingParams(max_tokens=answer, temperature=0.0, ignore_eos=True)
    said: list[int] = []
    times = []
    for _ in range(turns):
        said += [rng.randrange(1000, runner.vocab_size) for _ in range(message)]
        sequence = Sequence(said, params, seed=0)
        began, first = time.perf_counter(), 0.0
        scheduler.add(sequence)
        while not scheduler.is_idle:
            step = scheduler.schedule()
            output = runner.run(step)
            scheduler.finish(step, {each: sampled.token for each, sampled in output.sampled.items()})
            if sequence.num_output == 1:
                first = time.perf_counter() - began
        times.append((len(said), first))
        said = list(sequence.tokens)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(ROOT / "weights" / "SmolLM2-135M-Instruct.Q4_1.gguf"))
    parser.add_argument("--setting", choices=list(SETTINGS), default="fused")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--message", type=int, default=100, help="new tokens of each turn")
    parser.add_argument("--answer", type=int, default=50, help="tokens of each answer")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    blocks = -(-args.turns * (args.message + args.answer) // 16) + 2
    runner, _ = runner_for(args.setting, args.model, blocks)
    shape = (args.turns, args.message, args.answer)
    times: dict[bool, list[list[tuple[int, float]]]] = {False: [], True: []}
    for number in range(args.rounds + 1):
        for cached, rounds in times.items():
            measured = conversation(runner, number, *shape, cached=cached)
            if number:  # the first round picks kernels
                rounds.append(measured)
    print("| turn | prompt tokens | TTFT without, ms | with prefix cache, ms | ratio |")
    print("|---|---|---|---|---|")
    for turn in range(args.turns):
        tokens = times[False][0][turn][0]
        without, within = (statistics.median(each[turn][1] for each in times[key]) * 1e3 for key in (False, True))
        print(f"| {turn + 1} | {tokens} | {without:.0f} | {within:.0f} | {without / within:.1f} |")


if __name__ == "__main__":
    main()
