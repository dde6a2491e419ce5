"""client_examples/batch_corpus.py against the static and the continuous model: nothing lost, nothing done twice."""

import json
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.server.llm_client import ask
from tests.server.test_llm_modes import Batches
from tests.server.tritonserver import ROOT, TritonServer, free_ports


def command(server: str, folder: Path, *args: str) -> list[str]:
    program = str(ROOT / "client_examples" / "batch_corpus.py")
    files = [str(folder / "prompts.jsonl"), str(folder / "answers.jsonl")]
    return [sys.executable, program, *files, "--url", server, *args]


def run(server: str, folder: Path, *args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(server, folder, *args), capture_output=True, text=True, timeout=120)


def write_prompts(folder: Path, entries: list[dict[str, Any]]) -> None:
    (folder / "prompts.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries))


def answers(folder: Path) -> dict[Any, dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "answers.jsonl").read_text().splitlines()]
    assert max(Counter(line["id"] for line in lines).values()) == 1
    return {line["id"]: line for line in lines}


@pytest.mark.parametrize("model", ["llm_static", "llm"])
def test_all_prompts_are_answered_as_the_continuous_model_answers_each(
    llm_modes_server: TritonServer, tmp_path: Path, model: str
) -> None:
    write_prompts(tmp_path, [{"prompt": f"number {n}", "sampling_parameters": {"max_tokens": n}} for n in range(1, 21)])
    done = run(llm_modes_server.grpc, tmp_path, "--model", model)
    assert done.returncode == 0, done.stderr
    assert "20/20" in done.stderr
    found = answers(tmp_path)
    assert sorted(found) == list(range(1, 21))
    for number, answer in found.items():
        sampling = {"max_tokens": number, "temperature": 0}
        alone = ask(llm_modes_server.grpc, "llm", f"number {number}", sampling=sampling)
        assert answer["text"] == alone.text
        assert 1 <= answer["num_output_tokens"] <= number


def test_a_static_model_gets_full_batches(llm_modes_server: TritonServer, tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "hello"}]
    write_prompts(tmp_path, [{"prompt": "a"}] * 9 + [{"messages": chat}] * 3 + [{"prompt": "b"}] * 9)
    made = Batches(llm_modes_server, "llm_static")
    assert run(llm_modes_server.grpc, tmp_path, "--model", "llm_static", "--max-tokens", "3").returncode == 0
    assert len(answers(tmp_path)) == 21
    # 18 prompts fill one batch and 2 places of the next, 3 chats a third one.
    assert made.since() == (48, 3)


def test_a_killed_run_goes_on_where_it_ended(llm_modes_server: TritonServer, tmp_path: Path) -> None:
    write_prompts(tmp_path, [{"id": f"p{n}", "prompt": f"number {n}"} for n in range(80)])
    args = ("--model", "llm", "--concurrency", "4", "--max-tokens", "60")
    process = subprocess.Popen(command(llm_modes_server.grpc, tmp_path, *args), stderr=subprocess.DEVNULL)
    file = tmp_path / "answers.jsonl"
    deadline = time.monotonic() + 60
    while not file.exists() or file.read_text().count("\n") < 10:
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    before = file.read_text()
    whole = before[: before.rfind("\n") + 1]
    assert whole.count("\n") < 80, "it was killed too late to show anything"
    file.write_text(whole + '{"id": "p79", "te')  # as if the kill had hit a write
    done = run(llm_modes_server.grpc, tmp_path, *args)
    assert done.returncode == 0, done.stderr
    assert file.read_text().startswith(whole)
    assert set(answers(tmp_path)) == {f"p{n}" for n in range(80)}


@pytest.mark.parametrize("model", ["llm_static", "llm"])
def test_what_fails_is_named_and_the_rest_is_done(llm_modes_server: TritonServer, tmp_path: Path, model: str) -> None:
    bad = {"id": "bad", "prompt": "x", "sampling_parameters": {"top_p": 7}}
    write_prompts(tmp_path, [{"prompt": "a"}, bad, {"prompt": "b"}])
    done = run(llm_modes_server.grpc, tmp_path, "--model", model, "--max-tokens", "3", "--retries", "1")
    assert done.returncode == 1
    assert "error: id 'bad', tried 2 times" in done.stderr
    assert "top_p is 7" in done.stderr
    assert set(answers(tmp_path)) == {1, 3}


def test_no_server_is_one_line(tmp_path: Path) -> None:
    write_prompts(tmp_path, [{"prompt": "a"}])
    done = run(f"127.0.0.1:{free_ports(1)[0]}", tmp_path)
    assert done.returncode == 1
    assert done.stderr.startswith("error: 127.0.0.1:")
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("{", "prompts.jsonl:2 is not JSON"),
        ('{"prompt": "a", "messages": []}', 'allowed: an object with either "prompt" or "messages"'),
        ('{"id": 1, "prompt": "a"}', "id 1 was there before"),
    ],
)
def test_a_wrong_line_is_named_before_anything_is_sent(tmp_path: Path, line: str, complaint: str) -> None:
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "a"}\n' + line + "\n")
    done = run("127.0.0.1:1", tmp_path)
    assert done.returncode == 1
    assert complaint in done.stderr
    assert not (tmp_path / "answers.jsonl").exists()
