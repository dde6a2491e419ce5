"""Streams one answer over HTTP and prints the text as it comes. Needs nothing but Python.

    python client_examples/stream_http.py "The capital of France is" --max-tokens 30

`generate_stream` answers with server-sent events: lines `data: {...}`, each with the text that is new.
"""

import argparse
import json
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any


def events(url: str, request: dict[str, Any]) -> Iterator[dict[str, Any]]:
    try:
        response = urllib.request.urlopen(urllib.request.Request(url, json.dumps(request).encode()))
    except urllib.error.HTTPError as error:
        response = error  # a request that is wrong gets a status other than 200, and the reason as its only event
    with response:
        for line in response:
            data = line.decode().strip().removeprefix("data: ")
            if data:
                yield json.loads(data)


def main() -> None:
    parser = argparse.ArgumentParser(description="Streams one answer over HTTP.")
    parser.add_argument("prompt", nargs="?", default="The capital of France is")
    parser.add_argument("--url", default="localhost:8000", help="HTTP address (default: %(default)s)")
    parser.add_argument("--model", default="llm")
    parser.add_argument("--max-tokens", type=int, default=30)
    parser.add_argument("--temperature", type=float, default=0.0)
    args = parser.parse_args()

    request = {
        "text_input": args.prompt,
        "stream": True,
        "max_tokens": args.max_tokens,
        "temperature": args.temperature,
    }
    try:
        for event in events(f"http://{args.url}/v2/models/{args.model}/generate_stream", request):
            if "error" in event:
                sys.exit(f"error: {args.url}: {event['error']}")
            print(event["text_output"], end="", flush=True)
    except OSError as error:
        sys.exit(f"error: {args.url}: {getattr(error, 'reason', error)}")
    print()


if __name__ == "__main__":
    main()
