"""Starts a long answer, cancels it after a few tokens, and shows on the metrics page that its memory is free again.

    .venv/bin/python client_examples/cancel.py

The KV blocks that a request holds are what others wait for, so a client that has read enough should say so.
"""

import argparse
import itertools
import json
import queue
import re
import sys
import time
import urllib.request
from typing import Any

import numpy as np
import tritonclient.grpc as triton


def tensor(name: str, value: str | bool) -> triton.InferInput:
    is_text = isinstance(value, str)
    made = triton.InferInput(name, [1], "BYTES" if is_text else "BOOL")
    made.set_data_from_numpy(np.array([value], dtype=np.object_ if is_text else np.bool_))
    return made


def blocks_used(url: str, model: str) -> int:
    with urllib.request.urlopen(f"http://{url}/metrics") as page:
        found = re.search(rf'^llm:kv_blocks_used{{model="{model}".*}} (\S+)$', page.read().decode(), re.MULTILINE)
    return int(float(found[1])) if found else sys.exit(f"error: {url}: no llm:kv_blocks_used of model {model}")


def settled_blocks_used(url: str, model: str) -> int:
    time.sleep(1)  # the page is renewed twice a second
    return blocks_used(url, model)


def main() -> None:
    parser = argparse.ArgumentParser(description="Cancels an answer half-way.")
    parser.add_argument("--url", default="localhost:8001", help="gRPC address (default: %(default)s)")
    parser.add_argument("--metrics-url", default="localhost:8002", help="metrics address (default: %(default)s)")
    parser.add_argument("--model", default="llm")
    args = parser.parse_args()

    sampling = {"max_tokens": 4000, "ignore_eos": True}
    inputs = [tensor("text_input", "Once upon a time"), tensor("stream", True)]
    inputs.append(tensor("sampling_parameters", json.dumps(sampling)))
    responses: queue.Queue[tuple[Any, Any]] = queue.Queue()
    try:
        before = settled_blocks_used(args.metrics_url, args.model)
        with triton.InferenceServerClient(args.url) as client:
            client.is_server_live()  # raises when nobody listens; a stream would only break
            client.start_stream(lambda result, error: responses.put((result, error)))
            client.async_stream_infer(args.model, inputs)
            for count in itertools.count(1):
                _, error = responses.get()
                if error:
                    raise error
                during = blocks_used(args.metrics_url, args.model)
                if count >= 5 and (during > before or count >= 200):  # others may end meanwhile
                    break
            client.stop_stream(cancel_requests=True)
        cancelled = time.monotonic()
        while (after := blocks_used(args.metrics_url, args.model)) > before and time.monotonic() < cancelled + 10:
            time.sleep(0.1)
    except triton.InferenceServerException as error:
        sys.exit(f"error: {args.url}: {error.message()}")
    except OSError as error:
        sys.exit(f"error: {args.metrics_url}: {getattr(error, 'reason', error)}")
    print(f"cancelled after {count} of up to {sampling['max_tokens']} tokens")
    print(f"KV blocks used: {before} before, {during} while it ran, {after} after")


if __name__ == "__main__":
    main()
