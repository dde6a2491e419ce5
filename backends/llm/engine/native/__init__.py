"""Kernels in C++ for a decoder on a CPU, compiled once for the machine they run on, where a compiler is at hand."""

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch

log = logging.getLogger(__name__)

FOLDER = Path(__file__).parent
FLAGS = [
    "-O3", "-march=native", "-std=c++17", "-fPIC", "-fopenmp",
    # What lets sums be vectorised; NaN still counts as NaN, unlike under -ffast-math.
    "-fassociative-math", "-fno-signed-zeros", "-fno-trapping-math", "-fno-math-errno", "-freciprocal-math",
]  # fmt: skip
POINTER, INTEGER, FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
ARGUMENTS = {
    "paged_decode_fits": [INTEGER],
    "paged_decode": [POINTER, POINTER, INTEGER, *[POINTER] * 4, *[INTEGER] * 7, FLOAT, FLOAT],
    "rotate_and_store": [POINTER, *[INTEGER] * 4, *[POINTER] * 5],
    "int8_linear": [POINTER, POINTER, INTEGER, POINTER, FLOAT, POINTER, POINTER, *[INTEGER] * 3],
}


@functools.cache
def kernels() -> ctypes.CDLL | None:
    """The compiled functions; None, and the log says why, where they can't be had.

    `int8_linear` is among them on CPUs with AVX2 only.
    """
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        log.info("no C++ compiler is on PATH: everything stays in plain torch, which is slower")
        return None
    try:
        library = ctypes.CDLL(str(_compiled(compiler)))
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", None) or str(error)
        log.warning("the kernels could not be compiled; plain torch is used, which is slower: %s", said)
        return None
    for name, arguments in ARGUMENTS.items():
        if function := getattr(library, name, None):
            function.argtypes = arguments
    return library


def _compiled(compiler: str) -> Path:
    """The shared library's path. Compiled once for its sources, a compiler, a torch and a CPU."""
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout
    sources = sorted(FOLDER.glob("*.cpp"))
    texts = [path.read_text(encoding="utf-8") for path in [*sources, *sorted(FOLDER.glob("*.h"))]]
    key = hashlib.sha256("\0".join([*texts, version, torch.__version__, _cpu_flags(), *FLAGS]).encode())
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "triton-batching"
    target = cache / f"kernels-{key.hexdigest()[:16]}.so"
    if not target.exists():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as folder:
            made = [Path(folder) / f"{source.stem}.o" for source in sources]
            for source, into in zip(sources, made, strict=True):
                _run(compiler, *FLAGS, "-c", str(source), "-o", str(into))
            # torch's own OpenMP: a second one would bring threads of its own, and two pools fight for the cores.
            openmp = next((Path(torch.__file__).parent / "lib").glob("libgomp*"), None)
            linked = Path(folder) / "kernels.so"
            _run(compiler, "-shared", *map(str, made), "-o", str(linked), str(openmp) if openmp else "-fopenmp")
            linked.replace(target)
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
