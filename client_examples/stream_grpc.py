"""Streams one answer over gRPC and prints the text as it comes.

    .venv/bin/python client_examples/stream_grpc.py "The capital of France is" --max-tokens 30

A request can have many responses, so it goes over a stream: the client sends it and a callback gets what comes back.
"""

import argparse
import json
import queue
import sys
from typing import Any

import numpy as np
import tritonclient.grpc as triton


def tensor(name: str, value: str | bool) -> triton.InferInput:
    is_text = isinstance(value, str)
    made = triton.InferInput(name, [1], "BYTES" if is_text else "BOOL")
    made.set_data_from_numpy(np.array([value], dtype=np.object_ if is_text else np.bool_))
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description="Streams one answer over gRPC.")
    parser.add_argument("prompt", nargs="?", default="The capital of France is")
    parser.add_argument("--url", default="localhost:8001", help="gRPC address (default: %(default)s)")
    parser.add_argument("--model", default="llm")
    parser.add_argument("--max-tokens", type=int, default=30)
    parser.add_argument("--temperature", type=float, default=0.0)
    args = parser.parse_args()

    sampling = {"max_tokens": args.max_tokens, "temperature": args.temperature}
    inputs = [
        tensor("text_input", args.prompt),
        tensor("stream", True),
        tensor("sampling_parameters", json.dumps(sampling)),
    ]
    # The callback runs on a thread of the client's: it only hands over.
    responses: queue.Queue[tuple[Any, Any]] = queue.Queue()
    try:
        with triton.InferenceServerClient(args.url) as client:
            client.is_server_live()  # raises when nobody listens; a stream would only break
            client.start_stream(lambda result, error: responses.put((result, error)))
            client.async_stream_infer(args.model, inputs, enable_empty_final_response=True)
            final = False
            while not final:
                result, error = responses.get()
                if error:  # an error is the last response, too
                    raise error
                final = result.get_response().parameters["triton_final_response"].bool_param
                text = result.as_numpy("text_output")
                if text is not None:  # some models end with a response that holds nothing
                    print(text[0].decode(), end="", flush=True)
            print()
    except triton.InferenceServerException as error:
        sys.exit(f"error: {args.url}: {error.message()}")


if __name__ == "__main__":
    main()
