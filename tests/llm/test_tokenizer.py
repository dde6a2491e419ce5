"""Text and conversations to token ids."""

from typing import Any

import pytest
from engine.errors import InvalidRequest
from engine.tokenizer import Tokenizer
from tokenizers.processors import TemplateProcessing

from tests.llm.tiny_tokenizers import END, byte_level

TEMPLATE = (
    "{% for m in messages %}"
    "{% if m['role'] == 'villain' %}{{ raise_exception('no villains here') }}{% endif %}"
    "<|end|>{{ m['role'] }}: {{ m['content'] }}\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


def tokenizer(chat_template: str | None = TEMPLATE) -> Tokenizer:
    """One that begins every text with its special token."""
    fast = byte_level()
    fast.backend_tokenizer.post_processor = TemplateProcessing(single=f"{END} $A", special_tokens=[(END, 0)])
    fast.chat_template = chat_template
    return Tokenizer(fast, frozenset())


def test_a_text_gets_what_the_model_expects_around_it() -> None:
    assert tokenizer().encode("fox")[0] == 0
    assert tokenizer().encode("fox", special=False) == tokenizer().encode("fox")[1:]
    assert tokenizer().decode(tokenizer().encode("fox")) == "fox"
    assert tokenizer().decode(tokenizer().encode("fox"), skip_special=False) == f"{END}fox"


def test_a_conversation_waits_for_the_assistant_and_brings_its_own_special_tokens() -> None:
    ids = tokenizer().chat([{"role": "user", "content": "hi"}])
    assert ids.count(0) == 1
    assert tokenizer().decode(ids, skip_special=False) == f"{END}user: hi\nassistant:"


@pytest.mark.parametrize("messages", [None, [], {}, "hi", 5])
def test_what_is_no_list_of_messages_is_refused(messages: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"messages is .*; allowed: a non-empty JSON list"):
        tokenizer().chat(messages)


@pytest.mark.parametrize(
    "message",
    ["hi", {}, {"role": "user"}, {"content": "hi"}, {"role": "user", "content": None}, {"role": 1, "content": ""}],
)
def test_a_message_that_is_none_is_named(message: Any) -> None:
    with pytest.raises(
        InvalidRequest, match=r"messages\[1\] is .*; allowed: \{\"role\": string, \"content\": string\}"
    ):
        tokenizer().chat([{"role": "user", "content": "hi"}, message])


def test_a_model_without_a_template_takes_no_conversation() -> None:
    with pytest.raises(InvalidRequest, match="the model has no chat template; allowed: text_input"):
        tokenizer(None).chat([{"role": "user", "content": "hi"}])


def test_a_template_may_refuse() -> None:
    with pytest.raises(InvalidRequest, match="refused by the model's chat template: no villains here"):
        tokenizer().chat([{"role": "villain", "content": "ha"}])
