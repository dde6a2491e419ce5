# Sourced by scripts/serve, scripts/test and .ci/run: finds a Python, makes .venv and installs the pinned packages into it.
# Writes only below the repository's root (and pip's own cache), and can be interrupted at any point and run again.
# shellcheck shell=bash

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=$root/.venv

say() { echo "[setup] $*" >&2; }
die() { echo "error: $*" >&2; exit 1; }

check_machine() {
    local glibc
    [[ $(uname -sm) == "Linux x86_64" ]] ||
        die "this needs Linux on x86-64, and this is $(uname -sm): the packaged tritonserver exists for no other; use NVIDIA's container there."
    glibc=$(getconf GNU_LIBC_VERSION 2>/dev/null | cut -d' ' -f2) || true
    # Two versions sorted: the smaller one must be the 2.35 that the wheels were built for.
    [[ -n $glibc && $(printf '%s\n' 2.35 "$glibc" | sort -V | head -n1) == 2.35 ]] ||
        die "this needs glibc 2.35 or newer, and here is ${glibc:-none}: use Debian 12, Ubuntu 22.04 or anything newer, or NVIDIA's container."
}

# In NVIDIA's container a tritonserver is on PATH already and its Python backend embeds the container's Python. The packages still go into .venv,
# made from that same Python: the embedded interpreter takes the virtual environment whose bin/ is first on PATH, so the container itself stays as
# it is. (Not run in the container yet: it is written after that backend's sources.)
container_minor() {
    local server stub
    server=$(type -P tritonserver) || return 0
    stub=$(dirname "$(dirname "$(readlink -f "$server")")")/backends/python/triton_python_backend_stub
    ldd "$stub" 2>/dev/null | sed -n 's/.*libpython3\.\([0-9]*\)\.so.*/\1/p' | head -n1
}

# Prints "ok EXECUTABLE" for a usable interpreter, else the reason why it is none. Inside a virtual environment it speaks of the one beneath.
probe() {
    PYTHONPATH='' "$1" -I -c '
import importlib.util, os, sys, sysconfig
lib = os.path.join(sysconfig.get_config_var("LIBDIR") or "", sysconfig.get_config_var("INSTSONAME") or "none")
if sys.version_info[:2] not in ((3, 11), (3, 12)):
    print("is Python %d.%d, and 3.11 or 3.12 is needed" % sys.version_info[:2])
elif ".so" not in lib or not os.path.exists(lib):
    print("has no shared libpython (%s), which Triton embeds" % lib)
elif importlib.util.find_spec("ensurepip") is None or importlib.util.find_spec("venv") is None:
    print("cannot make virtual environments (no ensurepip or venv module)")
else:
    print("ok", getattr(sys, "_base_executable", None) or sys.executable)
' 2>/dev/null || echo "does not start"
}

# Sets base_python. Asks for TRITON_BATCHING_PYTHON alone if that is set, else for every python3.11, python3.12 and python3 on PATH.
find_python() {
    local minor candidate answer reasons="" candidates asked=" "
    minor=$(container_minor)
    case ${minor:-any} in
        any) candidates=$(type -aP python3.11 python3.12 python3 || true) ;;
        11 | 12) candidates=$(type -aP "python3.$minor" python3 || true) ;;
        *) die "the tritonserver on PATH embeds Python 3.$minor, and 3.11 or 3.12 is needed: use NVIDIA's container 24.12 or newer." ;;
    esac
    for candidate in ${TRITON_BATCHING_PYTHON:-$candidates}; do
        # python3 is often python3.11 by another name, and /bin is /usr/bin.
        [[ $asked != *" $(readlink -f "$candidate") "* ]] || continue
        asked+="$(readlink -f "$candidate") "
        answer=$(probe "$candidate")
        if [[ $answer == ok* ]]; then
            base_python=${answer#ok }
            return
        fi
        reasons+="; $candidate $answer"
    done
    complete_python "${minor:-$(distribution_minor)}" "${reasons:-; there is none on PATH}"
}

distribution_minor() {
    # shellcheck source=/dev/null
    case $(. /etc/os-release && echo "$ID $VERSION_ID") in
        "debian 12") echo 11 ;;
        "ubuntu 24.04") echo 12 ;;
    esac
}

# No interpreter fits as it is. A distribution's own only lacks packages: root gets them installed, others the one command to run.
complete_python() {
    local minor=$1 reasons=${2#; } packages answer
    if [[ -z $minor || -z $(type -P apt-get) || ${TRITON_BATCHING_PYTHON:-/usr/bin/} != /usr/bin/* ]]; then
        die "no usable Python 3.11 or 3.12: $reasons. Install one with its shared libpython, or name one in TRITON_BATCHING_PYTHON."
    fi
    packages="python3.$minor python3.$minor-venv libpython3.$minor"
    ((EUID == 0)) || die "no usable Python: $reasons. Run: sudo apt-get install $packages"
    say "No usable Python: $reasons. Installing $packages."
    # shellcheck disable=SC2086  # a list of words
    { apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends $packages; } >&2 ||
        die "apt-get could not install $packages: see above."
    answer=$(probe "/usr/bin/python3.$minor")
    [[ $answer == ok* ]] || die "/usr/bin/python3.$minor $answer, even after installing $packages."
    base_python=${answer#ok }
}

# pip_install ARGS: explains the failures that are not the user's own doing; pip's progress stays visible.
pip_install() {
    # Left there by a pip that was killed.
    rm -rf "$root/.cache/tmp" "$root/.cache/pip.log"
    mkdir -p "$root/.cache/tmp"
    TMPDIR=$root/.cache/tmp "$venv/bin/python" -m pip install --disable-pip-version-check --no-warn-conflicts --log "$root/.cache/pip.log" "$@" >&2 && return
    if grep -q 'No space left on device' "$root/.cache/pip.log"; then
        die "the disk is full: free some space below $root (about 2 GB, with a CUDA build of PyTorch 8 GB) and run this again."
    elif grep -Eq 'NewConnectionError|NameResolutionError|ConnectTimeoutError|Could not fetch URL|ProxyError' "$root/.cache/pip.log"; then
        die "the package index cannot be reached: check the network (or pip's proxy and index settings) and run this again."
    fi
    die "pip failed, see above (details in .cache/pip.log)."
}

stamp_of() { sha256sum "$@" | cut -d' ' -f1 | sha256sum | cut -d' ' -f1; }

# install_step NAME LOCKFILES: does nothing if .venv holds exactly these pins already. A killed pip can leave packages that look whole and are not,
# so a step that never finished leaves its mark, and set_up makes the environment anew.
install_step() {
    local stamp=$venv/stamp-$1 file now
    shift
    now=$(stamp_of "$@")
    [[ -f $stamp && $(<"$stamp") == "$now" ]] && return
    touch "$venv/unfinished"
    for file in "$@"; do
        say "Installing $(basename "$file") (the first time takes some minutes)."
        if [[ $file == */triton.lock ]]; then pip_install --no-deps -r "$file"; else pip_install -r "$file"; fi
    done
    echo "$now" >"$stamp"
    rm "$venv/unfinished"
}

# set_up [dev]: afterwards .venv holds what requirements/ pins, and is the environment of this shell.
set_up() {
    local files=("$root/requirements/server.lock")
    # A foreign PYTHONPATH or PYTHONHOME would leak other versions into the server's interpreters.
    unset PYTHONPATH PYTHONHOME
    check_machine
    type -P tritonserver >/dev/null || files+=("$root/requirements/triton.lock")
    mkdir -p "$root/.cache"
    exec 9>"$root/.cache/setup.lock"
    flock -n 9 || { say "Waiting for another set-up in this folder to finish."; flock 9; }
    # Made anew if it is half-made or its Python is gone. With other pins than the lock's it is brought up to date in place.
    if [[ -f $venv/unfinished ]] || ! "$venv/bin/python" -c '' 2>/dev/null; then
        find_python
        say "Making .venv with $base_python."
        rm -rf "$venv"
        mkdir "$venv"
        touch "$venv/unfinished"
        "$base_python" -m venv "$venv" >&2 || die "$base_python could not make a virtual environment: see above."
    fi
    install_step server "${files[@]}"
    [[ ${1:-} != dev ]] || install_step dev "$root/requirements/dev.lock"
    exec 9>&-
    export VIRTUAL_ENV=$venv PATH=$venv/bin:$PATH
}
