"""What figures were measured on: without it they mean nothing to anybody else."""

import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

from load.server import ROOT

PACKAGES = ("nvidia-pytriton", "tritonclient", "locust", "torch", "transformers", "diffusers", "numpy")


def describe() -> dict[str, Any]:
    """Of this machine, which is the server's too unless a running one was named."""
    return {
        "cpu": _first(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo")) or platform.processor() or "unknown",
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(int(_first(r"MemTotal:\s*(\d+)", Path("/proc/meminfo")) or 0) / 2**20, 1),
        "gpus": _gpus(),
        "system": f"{platform.system()} {platform.release()}",
        "load_average": round(os.getloadavg()[0], 2),  # before the first run: what else the machine had to do
    }


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def commit() -> str | None:
    """Of this repository, with "+" when files differ from it; None where there is no git."""
    try:
        name = _output("git", "-C", str(ROOT), "rev-parse", "HEAD").strip()
        return name + ("+" if _output("git", "-C", str(ROOT), "status", "--porcelain").strip() else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def in_words(machine: dict[str, Any]) -> str:
    gpus = ", ".join(machine["gpus"]) or "no GPU"
    return (
        f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']:g} GiB, {gpus}, {machine['system']}; "
        f"load average before the first run: {machine['load_average']:g}"
    )


def _gpus() -> list[str]:
    if not shutil.which("nvidia-smi"):
        return []
    try:
        return _output("nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader").strip().splitlines()
    except (OSError, subprocess.CalledProcessError):
        return []


def _first(pattern: str, file: Path) -> str | None:
    match = re.search(pattern, file.read_text()) if file.exists() else None
    return match[1].strip() if match else None


def _output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout
