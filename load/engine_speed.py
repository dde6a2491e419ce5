"""The engine alone, without a server: milliseconds a step and tokens a second, by decoder and batch size.

    .venv/bin/python load/engine_speed.py --batches 1 4 16 64

All requests start together with `--context` tokens each and are decoded for `--steps` steps, timed one by one. The
settings take turns, so that whatever else the machine does meets all of them; the median step counts.
"""

import argparse
import random
import statistics
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "backends" / "llm"))

import torch  # noqa: E402
from engine.block_pool import BlockPool  # noqa: E402
from engine.config import EngineConfig  # noqa: E402
from engine.loader import load_model, weights_folder  # noqa: E402
from engine.model_runner import ModelRunner  # noqa: E402
from engine.sampling_params import SamplingParams  # noqa: E402
from engine.scheduler import Limits, Scheduler  # noqa: E402
from engine.sequence import Sequence  # noqa: E402
from engine.tokenizer import Tokenizer  # noqa: E402

SETTINGS = {
    "transformers": {"decoder": "transformers"},
    "fused": {"decoder": "fused"},
    "int8": {"decoder": "fused", "quantization": "int8"},
}


def runner_for(setting: str, model: str, num_kv_blocks: int) -> tuple[ModelRunner, Tokenizer]:
    """One of SETTINGS, on a CPU in float32."""
    config = EngineConfig.from_dict({"model": model, "num_kv_blocks": num_kv_blocks, **SETTINGS[setting]})
    loaded, tokenizer = load_model(weights_folder(config, torch.float32), torch.float32, torch.device("cpu"))
    return ModelRunner(loaded, config, tokenizer.eos_token_ids), tokenizer


def step_times(runner: ModelRunner, batch: int, context: int, steps: int) -> tuple[float, list[float]]:
    """Seconds of the prefill of all prompts, and of each decoding step."""
    rng = random.Random(0)
    limits = Limits(batch, max(512, batch), 8192, prefix_caching=False)
    scheduler = Scheduler(BlockPool(runner.num_blocks, runner.block_size), limits)
    chunks = -(-batch * context // limits.max_num_batched_tokens)  # the first have so many tokens when the last begin
    params = SamplingParams(max_tokens=steps + chunks + 1, temperature=0.0, ignore_eos=True)
    for _ in range(batch):
        scheduler.add(Sequence([rng.randrange(1000, runner.vocab_size) for _ in range(context)], params, seed=0))
    prefill, decodes = 0.0, []
    while not scheduler.is_idle:
        began = time.perf_counter()
        step = scheduler.schedule()
        is_decode = step.num_tokens == batch and all(entry.sequence.is_decoding for entry in step.scheduled)
        output = runner.run(step)
        scheduler.finish(step, {sequence: sampled.token for sequence, sampled in output.sampled.items()})
        spent = time.perf_counter() - began
        if is_decode:
            decodes.append(spent)
        elif not decodes:
            prefill += spent
    return prefill, decodes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(ROOT / "weights" / "SmolLM2-135M-Instruct.Q4_1.gguf"))
    parser.add_argument("--settings", nargs="+", choices=list(SETTINGS), default=list(SETTINGS))
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--context", type=int, default=64, help="tokens of each prompt")
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int)
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    most = max(args.batches)
    blocks = most * (
        -(-(args.context + args.steps + most * args.context // 512 + 3) // 16) + 1
    )  # and one to spare each
    runners = {name: runner_for(name, args.model, blocks)[0] for name in args.settings}
    print(f"{torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}\n")
    print("| requests | " + " | ".join(f"{name}: ms/step, tok/s, prefill tok/s" for name in runners) + " |")
    print("|---" * (1 + len(runners)) + "|")
    for batch in args.batches:
        times: dict[str, list[float]] = {name: [] for name in runners}
        prefills: dict[str, list[float]] = {name: [] for name in runners}
        for number in range(args.rounds + 1):
            for name, runner in runners.items():
                prefill, decodes = step_times(runner, batch, args.context, args.steps if number else 2)
                if number:  # the first round picks kernels
                    times[name] += decodes
                    prefills[name].append(prefill)
        cells = []
        for name in runners:
            step = statistics.median(times[name])
            rate = batch * args.context / statistics.median(prefills[name])
            cells.append(f"{step * 1e3:.1f}, {batch / step:.0f}, {rate:.0f}")
        print(f"| {batch} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
