"""What quantization costs in quality: perplexity, and how often the likeliest token stays the same.

    .venv/bin/python load/quality.py --text README.md docs/*.md

The texts are cut into windows of `--window` tokens, each read from its start. All settings read the same windows.
"""

import argparse
import math
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "backends" / "llm")]

import torch  # noqa: E402
from engine.attention import AttentionBatch, PagedAttention  # noqa: E402
from engine.model_runner import ModelRunner  # noqa: E402
from tqdm import tqdm  # noqa: E402

from load.engine_speed import SETTINGS, runner_for  # noqa: E402


@torch.inference_mode()
def logits(runner: ModelRunner, window: list[int]) -> torch.Tensor:
    """[tokens, vocabulary]"""
    length = len(window)
    blocks = list(range(-(-length // runner.block_size)))
    positions = torch.arange(length)
    batch = AttentionBatch([length], [length], [blocks], positions, runner.block_size)
    attention = PagedAttention(runner.cache, positions, runner.attention, runner.attention.plan(batch))
    return runner.decoder.logits(torch.tensor(window), positions, positions, attention)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(ROOT / "weights" / "SmolLM2-135M-Instruct.Q4_1.gguf"))
    parser.add_argument("--text", type=Path, nargs="+", required=True)
    parser.add_argument("--settings", nargs="+", choices=list(SETTINGS), default=["transformers", "int8"])
    parser.add_argument("--window", type=int, default=256)
    parser.add_argument("--windows", type=int, default=40)
    args = parser.parse_args()
    loaded = {name: runner_for(name, args.model, -(-args.window // 16)) for name in args.settings}
    runners = {name: runner for name, (runner, _) in loaded.items()}
    tokenizer = loaded[args.settings[0]][1]
    tokens = tokenizer.encode("\n\n".join(path.read_text(encoding="utf-8") for path in args.text))
    windows = [tokens[i : i + args.window] for i in range(0, len(tokens) - args.window, args.window)][: args.windows]
    if not windows:
        sys.exit(f"error: the texts have {len(tokens)} tokens; allowed: at least --window ({args.window})")
    loss = dict.fromkeys(runners, 0.0)
    agreed = dict.fromkeys(runners, 0)
    for window in tqdm(windows, "windows"):
        first = None
        for name, runner in runners.items():
            rows = logits(runner, window)[:-1].float()
            loss[name] += float(torch.nn.functional.cross_entropy(rows, torch.tensor(window[1:]), reduction="sum"))
            best = rows.argmax(-1)
            first = best if first is None else first
            agreed[name] += int((best == first).sum())
    count = sum(len(window) - 1 for window in windows)
    base = next(iter(runners))
    print(f"{count} tokens\n\n| setting | perplexity | ratio | likeliest token as in {base} |\n|---|---|---|---|")
    for name in runners:
        ratio = math.exp((loss[name] - loss[base]) / count)
        print(f"| {name} | {math.exp(loss[name] / count):.3f} | {ratio:.4f} | {agreed[name] / count:.1%} |")


if __name__ == "__main__":
    main()
