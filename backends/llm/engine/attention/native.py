"""Paged attention on a CPU with a kernel of our own for decoding, where a C++ compiler is at hand; in float32.

Gathering each sequence's keys and values into one tensor, as plain torch has to, moves them three times.
"""

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch

from engine.attention import AttentionBatch
from engine.attention.reference import Group, ReferenceAttention

log = logging.getLogger(__name__)

SOURCE = Path(__file__).with_name("decode.cpp")
FLAGS = [
    "-O3", "-march=native", "-std=c++17", "-fPIC", "-fopenmp",
    # What lets sums be vectorised; NaN still counts as NaN, unlike under -ffast-math.
    "-fassociative-math", "-fno-signed-zeros", "-fno-trapping-math", "-fno-math-errno", "-freciprocal-math",
]  # fmt: skip


@functools.cache
def kernel() -> ctypes.CDLL | None:
    """The compiled kernel; None, and the log says why, where it can't be had."""
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        log.info("no C++ compiler is on PATH: attention stays in plain torch, which is slower")
        return None
    try:
        library = ctypes.CDLL(str(_compiled(compiler)))
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", None) or str(error)
        log.warning("the attention kernel could not be compiled; plain torch is used, which is slower: %s", said)
        return None
    pointer, integer = ctypes.c_void_p, ctypes.c_int64
    library.paged_decode.argtypes = [
        pointer, pointer, integer, pointer, pointer, pointer, pointer, *[integer] * 7, ctypes.c_float, ctypes.c_float
    ]  # fmt: skip
    library.paged_decode.restype = None
    return library


def _compiled(compiler: str) -> Path:
    """The shared library's path. Compiled once for a source, a compiler, a torch and a CPU."""
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout
    flags = _cpu_flags()
    key = hashlib.sha256("\0".join([SOURCE.read_text(), version, torch.__version__, flags, *FLAGS]).encode())
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "triton-batching"
    target = cache / f"decode-{key.hexdigest()[:16]}.so"
    if not target.exists():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as folder:
            made, compiled = Path(folder) / "decode.o", Path(folder) / "decode.so"
            _run(compiler, *FLAGS, "-c", str(SOURCE), "-o", str(made))
            # torch's own OpenMP: a second one would bring threads of its own, and two pools fight for the cores.
            openmp = next((Path(torch.__file__).parent / "lib").glob("libgomp*"), None)
            _run(compiler, "-shared", str(made), "-o", str(compiled), str(openmp) if openmp else "-fopenmp")
            compiled.replace(target)
    return target


def _run(*command: str) -> None:
    subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)


def _cpu_flags() -> str:
    """What -march=native goes by; a cache folder may be shared by different machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="ascii").splitlines()
        return next(line for line in lines if line.startswith(("flags", "Features")))
    except (OSError, StopIteration):
        return platform.processor()


@dataclass(frozen=True)
class Plan:
    tables: torch.Tensor  # [B, width] int64, of the sequences that decode
    contexts: torch.Tensor  # [B] int64
    groups: list[Group]  # the prompts' chunks


class NativeAttention(ReferenceAttention):
    def __init__(self, library: ctypes.CDLL) -> None:
        super().__init__()
        self._library = library

    def plan(self, batch: AttentionBatch) -> Plan:  # type: ignore[override]
        decodes = sum(queries == 1 for queries in batch.query_lens)
        contexts = list(batch.context_lens[:decodes])
        width = max((-(-context // batch.block_size) for context in contexts), default=0)
        tables = [[*table[:width], *[0] * (width - len(table))] for table in batch.block_tables[:decodes]]
        return Plan(
            torch.tensor(tables, dtype=torch.int64),
            torch.tensor(contexts, dtype=torch.int64),
            self.chunks(batch, decodes),
        )

    def attend(  # type: ignore[override]
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        plan: Plan,
        scale: float,
        window: int | None,
        softcap: float | None,
    ) -> torch.Tensor:
        out = torch.empty(query.shape, dtype=query.dtype)
        self.attend_groups(out, query, keys, values, plan.groups, scale, window, softcap)
        batch = len(plan.contexts)
        if batch:
            if query.stride()[1:] != (query.shape[2], 1):
                query = query.contiguous()
            block_size, kv_heads = keys.shape[1:3]
            self._library.paged_decode(
                out.data_ptr(), query.data_ptr(), query.stride(0), keys.data_ptr(), values.data_ptr(),
                plan.tables.data_ptr(), plan.contexts.data_ptr(), batch, plan.tables.shape[1], query.shape[1], kv_heads,
                query.shape[2], block_size, window or 0, scale, softcap or 0.0,
            )  # fmt: skip
        return out
