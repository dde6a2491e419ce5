"""A chat in the terminal: the conversation goes along with every question. Needs nothing but Python.

    python client_examples/chat.py
    python client_examples/chat.py --ask "What is the capital of France?"

`messages` is put through the model's own chat template on the server. Ctrl-C ends an answer, Ctrl-D the chat.
"""

import argparse
import json
import sys
import urllib.error
import urllib.request


def answer(args: argparse.Namespace, messages: list[dict[str, str]]) -> str:
    """Prints the answer as it comes. Raises RuntimeError with the server's words."""
    request = {
        "messages": json.dumps(messages),  # as text: Triton has no tensors of objects
        "stream": True,
        "max_tokens": args.max_tokens,
        "temperature": args.temperature,
    }
    url = f"http://{args.url}/v2/models/{args.model}/generate_stream"
    text = ""
    try:
        with urllib.request.urlopen(urllib.request.Request(url, json.dumps(request).encode())) as response:
            for line in response:
                if line.startswith(b"data: "):
                    event = json.loads(line.removeprefix(b"data: "))
                    if "error" in event:
                        raise RuntimeError(event["error"])
                    print(event["text_output"], end="", flush=True)
                    text += event["text_output"]
    except urllib.error.HTTPError as error:
        raise RuntimeError(json.loads(error.read().decode().strip().removeprefix("data: "))["error"]) from None
    except KeyboardInterrupt:  # hanging up tells the server to stop
        print(" ...", end="")
    except OSError as error:
        raise RuntimeError(getattr(error, "reason", error)) from None
    print()
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description="A chat in the terminal.")
    parser.add_argument("--ask", metavar="QUESTION", help="ask this one question and leave")
    parser.add_argument("--url", default="localhost:8000", help="HTTP address (default: %(default)s)")
    parser.add_argument("--model", default="llm")
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--temperature", type=float, default=0.0)
    args = parser.parse_args()

    messages: list[dict[str, str]] = []
    while True:
        try:
            question = args.ask or input("> ")
        except (EOFError, KeyboardInterrupt):
            return print()
        messages.append({"role": "user", "content": question})
        try:
            messages.append({"role": "assistant", "content": answer(args, messages)})
        except RuntimeError as error:
            print(f"error: {args.url}: {error}", file=sys.stderr)
            messages.pop()  # the question, so that another may fare better
            if args.ask:
                sys.exit(1)
        if args.ask:
            return


if __name__ == "__main__":
    main()
