"""Text to token ids and back, and the chat template: a thin cover over transformers' fast tokenizers."""

from collections.abc import Sequence as Items
from typing import Any

from engine.errors import InvalidRequest, shown
from engine.structured import Guides


class Tokenizer:
    def __init__(self, tokenizer: Any, eos_token_ids: frozenset[int]) -> None:
        """`tokenizer`: a fast tokenizer of transformers."""
        self._tokenizer = tokenizer
        self._backend = tokenizer.backend_tokenizer
        self.eos_token_ids = eos_token_ids

    def guides(self, vocab_size: int) -> Guides:
        return Guides(self._tokenizer, self.eos_token_ids, vocab_size)

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """`special`: add what the model expects around a text, such as a BOS. A chat template brings its own."""
        return self._backend.encode(text, add_special_tokens=special).ids

    def spellings(self, word: str) -> list[tuple[int, ...]]:
        """The tokens of a word at the beginning of a text and, if that makes a difference, after a space."""
        alone, inside = (tuple(self.encode(space + word.lstrip(), special=False)) for space in ("", " "))
        differ = len(inside) == len(alone) and inside[:1] != alone[:1]
        return [spelling for spelling in ([alone, inside] if differ else [alone]) if spelling]

    def decode(self, ids: Items[int], *, skip_special: bool = True) -> str:
        return self._backend.decode(list(ids), skip_special_tokens=skip_special)

    def chat(self, messages: Any) -> list[int]:
        """Token ids of a conversation that waits for the assistant's turn.

        Raises:
            InvalidRequest: not a list of {"role": ..., "content": ...} with strings, or the template refuses it.
        """
        if not isinstance(messages, list) or not messages:
            raise InvalidRequest(
                f"messages is {shown(messages)}; allowed: a non-empty JSON list of role/content objects"
            )
        for index, message in enumerate(messages):
            fits = isinstance(message, dict) and all(isinstance(message.get(k), str) for k in ("role", "content"))
            if not fits:
                raise InvalidRequest(
                    f'messages[{index}] is {shown(message)}; allowed: {{"role": string, "content": string}}'
                )
        if not self._tokenizer.chat_template:
            raise InvalidRequest("messages is given, but the model has no chat template; allowed: text_input")
        try:
            text = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        except Exception as error:  # templates raise whatever they like
            raise InvalidRequest(f"messages is refused by the model's chat template: {error}") from error
        return self.encode(text, special=False)
