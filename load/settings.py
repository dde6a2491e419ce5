"""The settings that decide how a model batches: which there are, how a copy of the model gets them, what to paste."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from google.protobuf import text_format  # type: ignore[import-untyped]

from load.plan import Model, read_config

SEATS, BATCH, DELAY = "max_num_seqs", "preferred_batch_size", "max_queue_delay_microseconds"
Setting = Mapping[str, int]
Space = Mapping[str, list[int]]  # of each setting the values to choose from, rising


def space(model: Model) -> dict[str, list[int]]:
    """What there is to choose for this model."""
    if model.seats == 0:
        return {SEATS: [1, 2, 4, 8, 16, 32, 64, 128, 256]}
    sizes = [1, 2, 4, 8, 16, 32, 64] if model.kind == "llm" else [1, 2, 4, 8, 16]
    return {BATCH: sizes, DELAY: [0, 10_000, 50_000, 100_000, 250_000, 500_000, 1_000_000]}


def canonical(setting: Setting) -> dict[str, int]:
    """A batch of one waits for nobody: its delay makes no difference."""
    return dict(setting) | ({DELAY: 0} if setting.get(BATCH) == 1 else {})


def copy_with(setting: Setting, model: Path, repository: Path) -> None:
    """Copies a model's folder into `repository`, which may lie anywhere, and gives the copy these settings."""
    copy = repository / model.name
    is_llm = read_config(model / "config.pbtxt").backend == "llm"
    shutil.copytree(model, copy)
    for file in copy.glob("*/model.json"):
        values = json.loads(file.read_text())
        for key in ("model", "vae"):
            path = model.parent / str(values.get(key))
            if values.get(key) and (str(values[key]).startswith(".") or path.exists()):  # else a model's name on a hub
                values[key] = str(path.resolve())
        values |= {key: value for key, value in setting.items() if key == SEATS}
        if is_llm:  # its engine refuses batches with more requests than it has seats for
            values[SEATS] = max(values.get(SEATS, 0), setting.get(BATCH, 1))
        # And a step must have a token for each of them.
        if "max_num_batched_tokens" in values:
            values["max_num_batched_tokens"] = max(values["max_num_batched_tokens"], values.get(SEATS, 0))
        file.write_text(json.dumps(values, indent=2) + "\n")
    if BATCH in setting:
        (copy / "config.pbtxt").write_text(text_format.MessageToString(_configured(setting, model)))


def to_paste(setting: Setting, model: Path) -> str:
    """The lines that give the model these settings, and the file that they belong into."""
    if SEATS in setting:
        return f'{model.name}/1/model.json:\n\n  "{SEATS}": {setting[SEATS]},\n'
    config = _configured(setting, model)
    lines = [f"max_batch_size: {config.max_batch_size}"]
    if config.HasField("dynamic_batching"):
        lines += ["dynamic_batching {", _indented(text_format.MessageToString(config.dynamic_batching)), "}"]
    else:
        lines.append("# and no dynamic_batching block")
    return f"{model.name}/config.pbtxt, instead of the lines of these names:\n\n" + "\n".join(lines) + "\n"


def _configured(setting: Setting, model: Path) -> Any:
    """The model's config with these settings, which are all that changes."""
    config = read_config(model / "config.pbtxt")
    # More than the preferred size would only make batches that nobody asked for.
    config.max_batch_size = setting[BATCH]
    if setting[BATCH] == 1:
        config.ClearField("dynamic_batching")
        return config
    batching = config.dynamic_batching
    del batching.preferred_batch_size[:]
    batching.preferred_batch_size.append(setting[BATCH])
    batching.max_queue_delay_microseconds = setting[DELAY]
    return config


def _indented(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.rstrip().splitlines())
