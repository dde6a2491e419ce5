"""client_examples/ as their readers run them: whole programs, against a real server and against none."""

import re
import subprocess
import sys
import time

import pytest

from tests.server.tritonserver import ROOT, TritonServer, free_ports

EXAMPLES = ("stream_grpc.py", "stream_http.py", "concurrent_asyncio.py", "cancel.py", "chat.py")
OVER_HTTP = ("stream_http.py", "chat.py")


def run(name: str, *args: str, typed: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "client_examples" / name), *args]
    return subprocess.run(command, input=typed, capture_output=True, text=True, timeout=120)


def output(name: str, *args: str, typed: str = "") -> str:
    """What an example prints. It must end well and have nothing to complain about."""
    done = run(name, *args, typed=typed)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def complaint(name: str, *args: str) -> str:
    """The one line that an example says when it fails."""
    done = run(name, *args)
    assert done.returncode == 1
    lines = done.stderr.splitlines()
    assert len(lines) == 1, done.stderr
    return lines[0]


def address(server: TritonServer, name: str) -> str:
    return server.http if name in OVER_HTTP else server.grpc


def test_every_example_is_tested() -> None:
    others = ["batch_corpus.py", "txt2img.py", "txt2img_async.py"]  # by test_batch_corpus.py and test_sdxl.py
    assert sorted([*EXAMPLES, *others]) == sorted(path.name for path in (ROOT / "client_examples").glob("*.py"))


@pytest.mark.parametrize("name", ["stream_grpc.py", "stream_http.py"])
def test_streaming_prints_the_answer(llm_server: TritonServer, name: str) -> None:
    args = ["The capital of France is", f"--url={address(llm_server, name)}", "--max-tokens=3"]
    assert output(name, *args).strip().startswith("Paris")


def test_both_ways_of_streaming_give_the_same_text(llm_server: TritonServer) -> None:
    texts = {
        output(name, "Water is", f"--url={address(llm_server, name)}", "--max-tokens=12")
        for name in ("stream_grpc.py", "stream_http.py")
    }
    assert len(texts) == 1


def test_concurrent_requests_all_get_their_own_answers(llm_server: TritonServer) -> None:
    lines = output(
        "concurrent_asyncio.py", f"--url={llm_server.grpc}", "--concurrency=5", "--max-tokens=4"
    ).splitlines()
    assert [line.split()[3] for line in lines[:-1]] == ["France", "Japan", "Egypt", "Peru", "Canada"]
    assert "Paris" in lines[0]
    assert "Tokyo" in lines[1]
    assert re.fullmatch(r"5 answers, 20 tokens in \d+\.\d s: \d+ tokens/s", lines[-1])


def test_cancelling_frees_the_kv_blocks(llm_server: TritonServer) -> None:
    text = output("cancel.py", f"--url={llm_server.grpc}", f"--metrics-url={llm_server.metrics}")
    cancelled = re.search(r"cancelled after (\d+) of up to 4000 tokens", text)
    assert cancelled
    assert 5 <= int(cancelled[1]) < 4000
    blocks = re.search(r"KV blocks used: 0 before, (\d+) while it ran, 0 after", text)
    assert blocks
    assert int(blocks[1]) >= 1


def test_chat_answers_one_question(llm_server: TritonServer) -> None:
    question = ["--ask", "What is the capital of France?"]
    assert "Paris" in output("chat.py", f"--url={llm_server.http}", "--max-tokens=20", *question)


def test_chat_takes_turns_until_the_input_ends(llm_server: TritonServer) -> None:
    questions = "What is the capital of France?\nSay that again.\n"
    answers = output("chat.py", f"--url={llm_server.http}", "--max-tokens=12", typed=questions).split("> ")
    assert len(answers) == 4  # nothing, two answers, and the end of the input
    assert "Paris" in answers[1]
    assert answers[2].strip()


def test_chat_sends_the_conversation_along(llm_server: TritonServer) -> None:
    def counted() -> int:
        time.sleep(1)  # the page is renewed twice a second
        page = llm_server.metric_text()
        found = re.search(r"^vllm:prompt_tokens_total\{.*\} (\S+)$", page, re.MULTILINE)
        return int(float(found[1])) if found else 0

    def prompt_tokens(typed: str) -> int:
        before = counted()
        output("chat.py", f"--url={llm_server.http}", "--max-tokens=2", typed=typed)
        return counted() - before

    assert prompt_tokens("Hello\nHello\n") > 2 * prompt_tokens("Hello\n")


@pytest.mark.parametrize("name", ["stream_grpc.py", "stream_http.py", "concurrent_asyncio.py", "chat.py"])
def test_what_the_server_refuses_is_one_line(llm_server: TritonServer, name: str) -> None:
    args = [f"--url={address(llm_server, name)}", "--max-tokens=0"]
    if name == "chat.py":
        args.append("--ask=Hello")
    expected = f"error: {address(llm_server, name)}: max_tokens is 0; allowed: an integer of at least 1"
    assert complaint(name, *args) == expected


@pytest.mark.parametrize("name", ["stream_grpc.py", "stream_http.py", "concurrent_asyncio.py", "chat.py"])
def test_a_model_that_is_not_there_is_one_line(llm_server: TritonServer, name: str) -> None:
    args = [f"--url={address(llm_server, name)}", "--model=no_such_model"]
    if name == "chat.py":
        args.append("--ask=Hello")
    assert "Request for unknown model: 'no_such_model' is not found" in complaint(name, *args)


@pytest.mark.parametrize("name", EXAMPLES)
def test_no_server_is_one_line(name: str) -> None:
    url = f"127.0.0.1:{free_ports(1)[0]}"
    args = [f"--url={url}"]
    if name == "cancel.py":
        args.append(f"--metrics-url={url}")
    if name == "chat.py":
        args.append("--ask=Hello")
    said = complaint(name, *args)
    assert said.startswith(f"error: {url}: ")
    assert "Connection refused" in said


def test_cancel_without_grpc_is_one_line(llm_server: TritonServer) -> None:
    url = f"127.0.0.1:{free_ports(1)[0]}"
    said = complaint("cancel.py", f"--url={url}", f"--metrics-url={llm_server.metrics}")
    assert said.startswith(f"error: {url}: ")
    assert "Connection refused" in said
