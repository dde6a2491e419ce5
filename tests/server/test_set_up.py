"""scripts/lib.sh in a folder of its own: what it does on machines that lack something, and after an interruption."""

import os
import shutil
import signal
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from tests.server.tritonserver import ROOT, group_members
from tests.server.waiting import wait_for

PYTHON = Path(sysconfig.get_config_var("BINDIR")) / f"python3.{sys.version_info.minor}"
TOOLS = (
    "bash basename cat cut dirname env flock getconf grep head id ldd mkdir readlink rm sed sha256sum sort touch uname"
)

# What a fitting Python is made to say about itself, to pass for one that doesn't fit.
LACKS = {
    "version": "import sys; sys.version_info = (3, 9, 18)",
    "libpython": "import sysconfig; sysconfig.get_config_var = lambda name: 'libpython3.11.a'",
    "venv": "import importlib.util; importlib.util.find_spec = lambda name: None",
}


class Machine:
    """A folder with the scripts and empty locks, and a PATH with the basic tools and nothing else."""

    def __init__(self, folder: Path) -> None:
        self.root, self.bin = folder / "root", folder / "bin"
        shutil.copytree(ROOT / "scripts", self.root / "scripts")
        (self.root / "requirements").mkdir()
        for name in ("server", "triton", "dev"):
            (self.root / "requirements" / f"{name}.lock").touch()
        self.bin.mkdir()
        for tool in TOOLS.split():
            (self.bin / tool).symlink_to(str(shutil.which(tool)))
        self.venv = self.root / ".venv"

    def add(self, name: str, script: str) -> Path:
        tool = self.bin / name
        tool.unlink(missing_ok=True)
        tool.write_text(f"#!/bin/sh\n{script}\n")
        tool.chmod(0o755)
        return tool

    def add_python(self, name: str, lacks: str | None = None) -> Path:
        if lacks is None:
            return self.add(name, f'exec {PYTHON} "$@"')
        # lib.sh asks a Python about itself with -I -c CODE.
        return self.add(name, f'exec {PYTHON} -I -c "{LACKS[lacks]}; import sys; exec(sys.argv[1])" "$3"')

    def start(self, code: str = "set_up; echo done", **env: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            ["bash", "-c", f"set -euo pipefail; source scripts/lib.sh; {code}"],
            cwd=self.root,
            env={"PATH": str(self.bin), "HOME": str(self.root), **env},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def set_up(self, **env: str) -> tuple[bool, str]:
        """Whether it went well, and what it said."""
        process = self.start(**env)
        output, errors = process.communicate(timeout=60)
        assert (output == "done\n") == (process.returncode == 0)
        return process.returncode == 0, errors


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


@pytest.mark.parametrize(
    ("tool", "script", "message"),
    [
        ("uname", "echo Linux aarch64", "this needs Linux on x86-64, and this is Linux aarch64"),
        ("getconf", "echo glibc 2.31", "this needs glibc 2.35 or newer, and here is 2.31"),
        ("getconf", "exit 1", "this needs glibc 2.35 or newer, and here is none"),
    ],
)
def test_a_machine_that_cannot_run_tritonserver_is_told_so(
    machine: Machine, tool: str, script: str, message: str
) -> None:
    machine.add(tool, script)
    good, errors = machine.set_up()
    assert not good
    assert errors.startswith(f"error: {message}")
    assert errors.count("\n") == 1
    assert not machine.venv.exists()


@pytest.mark.parametrize(
    ("lacks", "message"),
    [
        ("version", "is Python 3.9, and 3.11 or 3.12 is needed"),
        ("libpython", "has no shared libpython"),
        ("venv", "cannot make virtual environments"),
    ],
)
def test_a_python_that_does_not_fit_is_named_with_the_reason(machine: Machine, lacks: str, message: str) -> None:
    chosen = machine.add_python("my-python", lacks)
    machine.add_python("python3")
    good, errors = machine.set_up(TRITON_BATCHING_PYTHON=str(chosen))
    assert not good
    assert errors.startswith(f"error: no usable Python 3.11 or 3.12: {chosen} {message}")
    assert errors.endswith("Install one with its shared libpython, or name one in TRITON_BATCHING_PYTHON.\n")


def test_without_any_python_it_says_what_to_install(machine: Machine) -> None:
    good, errors = machine.set_up()
    assert not good
    assert "there is none on PATH. Install one" in errors


def test_the_first_python_that_fits_is_taken(machine: Machine) -> None:
    machine.add("python3.11", "echo 'pyenv: python3.11: command not found' >&2; exit 127")
    machine.add_python("python3.12", "libpython")
    machine.add_python("python3")
    process = machine.start("find_python; echo $base_python")
    output, errors = process.communicate(timeout=60)
    assert (Path(output.strip()).resolve(), errors) == (PYTHON.resolve(), "")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root installs packages")
def test_root_gets_a_distributions_missing_packages_installed(machine: Machine) -> None:
    calls = machine.root / "calls"
    machine.add("apt-get", f'echo "$@" >>{calls}; [ "$1" = update ]')
    process = machine.start("complete_python 11 '; it has no libpython'")
    _, errors = process.communicate(timeout=60)
    assert calls.read_text().splitlines() == [
        "update",
        "install -y --no-install-recommends python3.11 python3.11-venv libpython3.11",
    ]
    assert process.returncode == 1
    assert errors.splitlines()[-1].startswith(
        "error: apt-get could not install python3.11 python3.11-venv libpython3.11"
    )


def test_a_set_up_that_was_killed_is_made_anew_and_then_left_alone(machine: Machine) -> None:
    machine.add_python("python3")
    first = machine.start()
    wait_for((machine.venv / "bin").exists, seconds=30, pause=0.005)
    os.killpg(first.pid, signal.SIGKILL)
    first.communicate()
    wait_for(lambda: not group_members(first.pid), seconds=30, pause=0.005)
    (machine.venv / "half-made").touch()
    good, errors = machine.set_up()
    assert good
    assert "Making .venv" in errors
    assert not (machine.venv / "half-made").exists()
    assert machine.set_up() == (True, "")

    (machine.root / "requirements" / "server.lock").write_text("# another pin\n")
    good, errors = machine.set_up()
    assert good
    assert "Installing server.lock" in errors
    assert "Making .venv" not in errors


def test_an_environment_whose_python_is_gone_is_made_anew(machine: Machine) -> None:
    # Without pip, which takes seconds to install and is not needed here.
    python = machine.add("python3", f'exec {PYTHON} "$@" --without-pip')
    (machine.venv / "bin").mkdir(parents=True)
    (machine.venv / "bin" / "python").symlink_to("/nowhere/python3")
    output, errors = machine.start(
        f"find_python() {{ base_python={python}; }}; install_step() {{ :; }}; set_up; python -c 'print(1)'"
    ).communicate(timeout=60)
    assert output == "1\n"
    assert "Making .venv" in errors


@pytest.mark.parametrize(
    ("index", "message"),
    [
        # Port 9 of this machine: nobody listens.
        ("http://127.0.0.1:9/simple", "error: the package index cannot be reached: check the network"),
        ("file:///nowhere", "error: pip failed, see above (details in .cache/pip.log)."),
    ],
)
def test_a_failing_pip_is_explained(machine: Machine, index: str, message: str) -> None:
    settings = {"PIP_CONFIG_FILE": "/dev/null", "PIP_INDEX_URL": index, "PIP_RETRIES": "0"}
    process = machine.start(f"venv={ROOT}/.venv; pip_install a-package-that-is-not-installed", **settings)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert errors.splitlines()[-1].startswith(message)
