"""Becomes tritonserver: checks the ports, assembles the backend directory, fetches weights, then replaces itself.

Run by scripts/serve inside .venv.
"""

import ctypes
import errno
import os
import shutil
import socket
import sys
import sysconfig
from itertools import pairwise
from pathlib import Path

import weights
from weights import CACHE, ROOT, die, locked

BACKENDS = CACHE / "backends"
AS_VLLM = "--as-vllm"  # models of the backend `vllm` are served by ours; a folder of its own, for other servers may run
# Of our own repository, the models that are loaded unless others are named. The rest are these under another policy.
PRODUCTS = ["llm", "sdxl"]

# Flag, what is served there, the flag that turns it off, and tritonserver's default port.
PORTS = [
    ("--http-port", "HTTP", "--allow-http", 8000),
    ("--grpc-port", "gRPC", "--allow-grpc", 8001),
    ("--metrics-port", "metrics", "--allow-metrics", 8002),
]


def values(args: list[str], flag: str) -> list[str]:
    """All values that `args` give to `flag`, written as `--flag value` or `--flag=value`."""
    pairs = [(*arg.partition("="), following) for arg, following in pairwise([*args, ""])]
    return [value if equals else following for name, equals, value, following in pairs if name == flag]


def take_flag(args: list[str], flag: str) -> tuple[bool, list[str]]:
    """Takes our own `flag` out of `args`; what follows a `--` is not ours."""
    end = args.index("--") if "--" in args else len(args)
    return flag in args[:end], [arg for position, arg in enumerate(args) if arg != flag or position > end]


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
    entries = [entry for repository in repositories for entry in sorted(repository.iterdir())]
    return {entry.name: entry for entry in entries if entry.is_dir()}


def command_line(
    home: Path, models: list[str] | None, args: list[str], backends: Path = BACKENDS
) -> tuple[list[str], list[Path]]:
    """The command, with our defaults where `args` say nothing else, and the models that it may load."""
    given = values(args, "--model-repository") + values(args, "--model-store")
    directories = model_directories([Path(path) for path in given] or [ROOT / "model_repository"])
    defaults = {
        "--backend-directory": str(backends),
        "--cache-directory": str(home / "caches"),
        "--http-address": "127.0.0.1",
        "--grpc-address": "127.0.0.1",
        "--metrics-address": "127.0.0.1",
    }
    if not Path("/dev/nvidiactl").exists():
        # Without a GPU they are only warnings in the log, and a log file of their own in /var/log.
        defaults["--allow-gpu-metrics"] = "false"
    if not given:
        defaults["--model-repository"] = str(ROOT / "model_repository")
    ours = [f"{flag}={value}" for flag, value in defaults.items() if not values(args, flag)]
    if not any("stub-timeout-seconds" in value for value in values(args, "--backend-config")):
        # Triton gives up on a Python model that takes longer to start, 30 s if not told otherwise, and then waits for
        # its process forever. Several models that start at once on a few cores, or large weights, do take longer.
        ours.append("--backend-config=python,stub-timeout-seconds=600")

    server = str(home / "bin" / "tritonserver")
    if models is None and not given and not values(args, "--model-control-mode"):
        models = PRODUCTS
    if models == ["all"]:
        models = list(directories)
    named = models
    if models is not None:
        if values(args, "--model-control-mode"):
            die("--models sets --model-control-mode and --load-model itself: give either the one or the others.")
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
    """Says which port is taken before models are loaded; tritonserver itself finds out only after that."""
    for flag, what, allow, default in PORTS:
        shared = values(args, flag.replace("--", "--reuse-"))
        if "true" in shared or "1" in shared or "false" in values(args, allow) or "0" in values(args, allow):
            continue
        address = (values(args, flag.replace("port", "address")) or ["127.0.0.1"])[-1]
        port = (values(args, flag) or [str(default)])[-1]
        with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((address, int(port)))
            except (OSError, ValueError, OverflowError) as error:
                if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
                    die(f"port {port} ({what}) is in use on {address}: stop what listens there or give another {flag}.")
                # Anything else is tritonserver's to judge.


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


def assemble_backends(backends: Path, installed: Path, stub: Path, *, as_vllm: bool) -> None:
    """`backends`: the installed ones, Python's with the stub of this Python, and each folder of backends/."""
    backends.mkdir(parents=True, exist_ok=True)
    own = {folder.name: folder for folder in (ROOT / "backends").glob("[!._]*/")}
    if as_vllm:
        own["vllm"] = own["llm"]
    others = {folder.name: folder for folder in installed.iterdir() if folder.is_dir() and folder.name != "python"}
    for entry in backends.iterdir():
        if entry.name not in {"python", *own, *others}:
            entry.unlink()
    for name, folder in (others | own).items():
        link(backends / name, folder)
    python = backends / "python"
    python.mkdir(exist_ok=True)
    for file in [*(installed / "python").iterdir(), stub]:
        if file.is_file():
            copy_if_changed(file, python / file.name)


def libpython_directory() -> Path:
    """A folder with nothing but a link to the shared libpython of .venv's own Python.

    The stub embeds whatever libpython the loader finds first, and another build, even of the same version, breaks C
    extensions. LD_LIBRARY_PATH gets this folder, not the library's own, which as a rule is /usr/lib with all the rest.
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


def needs_weights(model: Path) -> bool:
    return any(weights.WEIGHTS.name in file.read_text(errors="replace") for file in model.glob("*/model.json"))


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

    as_vllm, args = take_flag(sys.argv[1:], AS_VLLM)
    backends = BACKENDS.with_name("backends-vllm") if as_vllm else BACKENDS
    models, args = split_models(args)
    command, directories = command_line(home, models, args, backends)
    if "--help" not in args:
        check_ports(args)
    with locked():
        assemble_backends(backends, home / "backends", stub, as_vllm=as_vllm)
        libraries.insert(0, str(libpython_directory()))
        if any(needs_weights(directory) for directory in directories):
            weights.fetch()

    inherited = os.environ.get("LD_LIBRARY_PATH")
    os.environ["LD_LIBRARY_PATH"] = ":".join(libraries + ([inherited] if inherited else []))
    os.execv(command[0], command)


if __name__ == "__main__":
    main()
