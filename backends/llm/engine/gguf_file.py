"""A GGUF file made into a transformers folder, once; the folder is kept beside the file.

transformers dequantizes the weights and translates the names; that takes a minute's share that no second start should
pay again. Values are kept exactly, in the dtype they will run in.
"""

import json
import logging
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from tokenizers import pre_tokenizers

log = logging.getLogger(__name__)

STAMP = "converted_from.json"
# How llama.cpp cuts text into words before BPE, by the file's `tokenizer.ggml.pre`, where transformers' own conversion
# differs. SmolLM's tokenizer.json: every digit is a word.
PRE_TOKENIZERS = {
    "smollm": lambda: pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    ),
}


def as_folder(file: Path, dtype: torch.dtype) -> Path:
    """The folder that holds the model of a GGUF file, made if need be."""
    stat = file.stat()
    stamp = {"file": file.name, "bytes": stat.st_size, "modified_ns": stat.st_mtime_ns, "format": 1}
    folder = file.with_name(f"{file.stem}.{str(dtype).removeprefix('torch.')}")
    if _read_stamp(folder) == stamp:
        return folder
    log.warning("converting %s once, into %s", file.name, folder)
    try:
        work = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=file.parent))
    except OSError as error:
        log.warning("%s can't be written (%s): the conversion is repeated at every start", file.parent, error)
        work = Path(tempfile.mkdtemp(prefix="gguf-"))
        folder = work
    try:
        _convert(file, dtype, work)
        (work / STAMP).write_text(json.dumps(stamp), encoding="utf-8")
        work.chmod(0o755)  # a server of another user may read it
        for made in work.iterdir():
            made.chmod(0o644)
        return _put_in_place(work, folder, stamp)
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise


def _read_stamp(folder: Path) -> object:
    try:
        return json.loads((folder / STAMP).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def _put_in_place(work: Path, folder: Path, stamp: object) -> Path:
    """By renaming, so that a folder is whole or not there. Another process may have been quicker."""
    if work == folder or _read_stamp(folder) == stamp:
        if work != folder:
            shutil.rmtree(work)
        return folder
    if folder.exists():  # of an older file
        shutil.rmtree(folder)
    try:
        os.replace(work, folder)
    except OSError:
        if _read_stamp(folder) != stamp:
            raise
        shutil.rmtree(work)
    return folder


def _convert(file: Path, dtype: torch.dtype, folder: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    tokenizer = AutoTokenizer.from_pretrained(**source)
    pre = PRE_TOKENIZERS.get(_metadata(file, "tokenizer.ggml.pre"))
    if pre:
        tokenizer.backend_tokenizer.pre_tokenizer = pre()
    tokenizer.save_pretrained(folder)
    dequantized = AutoModelForCausalLM.from_pretrained(**source, dtype=dtype)
    # transformers won't save a model that came from a quantized file, so the weights move to one that did not.
    config = dequantized.config
    del config.quantization_config
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.load_state_dict(dequantized.state_dict(), assign=True)
    model.tie_weights()
    model.generation_config = dequantized.generation_config
    model.save_pretrained(folder)


def _metadata(file: Path, key: str) -> Any:
    from gguf import GGUFReader

    field = GGUFReader(file).get_field(key)
    return field.contents() if field else None
