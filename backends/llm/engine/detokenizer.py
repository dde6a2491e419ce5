"""A stream of tokens to a stream of text: no broken UTF-8, nothing past a stop string."""

from collections.abc import Sequence as Items

from engine.tokenizer import Tokenizer

REPLACEMENT = "\ufffd"  # what decoders print for bytes that are no UTF-8 (yet)
# Decoders treat the first token of a text in a way of their own (some drop its space), so a few of the prompt's last
# tokens stand before the output's first.
LEAD = 6


class Detokenizer:
    """Holds back the bytes of an unfinished character until it is whole."""

    def __init__(self, tokenizer: Tokenizer, prompt: Items[int] = (), *, skip_special: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._ids = list(prompt[-LEAD:])
        # Text of ids[:_done] is out. Decoding starts a little earlier, at _start, for the sake of the first token.
        self._start = 0
        self._done = len(self._ids)

    def push(self, ids: Items[int]) -> str:
        """The text that these tokens complete."""
        self._ids += ids
        known, text = self._decode(self._done), self._decode(len(self._ids))
        if len(text) <= len(known) or text.endswith(REPLACEMENT):
            return ""
        self._start, self._done = self._done, len(self._ids)
        self._trim()
        return text[len(known) :]

    def flush(self) -> str:
        """What was held back; nothing comes after it."""
        known, text = self._decode(self._done), self._decode(len(self._ids))
        self._done = len(self._ids)
        return text[len(known) :]

    def _decode(self, end: int) -> str:
        return self._tokenizer.decode(self._ids[self._start : end], skip_special=self._skip_special)

    def _trim(self) -> None:
        if self._start > 256:  # keep a long stream's memory flat
            del self._ids[: self._start]
            self._done -= self._start
            self._start = 0


class StopStrings:
    """Cuts a stream of text before the stop string that is complete first; ties go to the one listed first.

    Holds back only what may still turn out to be the start of a stop string.
    """

    def __init__(self, stops: Items[str], *, include: bool = False) -> None:
        self._stops = tuple(stops)
        self._include = include
        self._held = ""
        self.stopped = False

    def push(self, text: str) -> str:
        """The text that may go out. After a stop string was found, nothing more does."""
        if self.stopped:
            return ""
        text = self._held + text
        found = [(text.find(stop) + len(stop), order, stop) for order, stop in enumerate(self._stops) if stop in text]
        if found:
            end, _, stop = min(found)
            self.stopped, self._held = True, ""
            return text[: end if self._include else end - len(stop)]
        keep = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that `stop` begins with."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)
