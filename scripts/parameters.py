"""Writes docs/parameters.md from the dataclass that reads the parameters: .venv/bin/python scripts/parameters.py"""

import json
import sys
from dataclasses import fields
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "parameters.md"
HEAD = """# Sampling parameters

Written by `scripts/parameters.py` from [sampling_params.py](../backends/llm/engine/sampling_params.py). The names,
ranges and meanings are vLLM's where it has them; `max_time` and `max_queue_time` are ours. A parameter goes into
`sampling_parameters` (a JSON object), beside the inputs as a request parameter, or into an input of its name where the
third column gives a type; what comes in several ways must say the same. Numbers may be strings, except over HTTP's
`generate` where the third column gives a type. `priority` goes into `sampling_parameters` alone: as a request parameter
it is Triton's own.

| parameter | default | input | allowed | |
|---|---|---|---|---|
"""
OTHERS = """
`structured_outputs` is an object such as `{"json": {...a schema...}}`, `{"regex": "[a-z]+"}`,
`{"choice": ["yes", "no"]}`, `{"grammar": "..."}` or `{"json_object": true}`; vLLM's older names, `guided_json` and so
on, mean the same. As a request parameter an object or a list is JSON in a string.

## TensorRT-LLM's names

| its name | here | input |
|---|---|---|
"""
NEUTRAL_HEAD = """
Other names are taken where they change nothing, and refused otherwise:

| name | allowed |
|---|---|
"""


def page() -> str:
    sys.path[:0] = [str(ROOT / "backends" / "llm")]
    from engine.sampling_params import ALIASES, NEUTRAL, SamplingParams, plain
    from schema import LISTS, SAMPLING_TENSORS

    def tensor(name: str) -> str:
        kind = SAMPLING_TENSORS.get(name, "").removeprefix("TYPE_")
        return f"{kind}[{-1 if name in LISTS else 1}]" if kind else ""

    lines = [HEAD]
    for field in fields(SamplingParams):
        default = "{}" if field.name == "logit_bias" else json.dumps(plain(field.default))
        allowed, says = (field.metadata[key].replace("|", "\\|") for key in ("allowed", "says"))
        lines.append(f"| `{field.name}` | {default} | {tensor(field.name)} | {allowed} | {says} |\n")
    lines.append(OTHERS)
    lines += [f"| `{theirs}` | `{ours}` | {tensor(theirs)} |\n" for theirs, ours in ALIASES.items()]
    lines.append(NEUTRAL_HEAD)
    for name, allowed in NEUTRAL.items():
        words = "anything" if allowed is None else " or ".join(json.dumps(each) for each in allowed)
        lines.append(f"| `{name}` | {words} |\n")
    return "".join(lines)


if __name__ == "__main__":
    PAGE.write_text(page())
