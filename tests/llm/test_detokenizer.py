"""Streamed text is the whole text, cut where characters end, and never past a stop string."""

import itertools
import random

import pytest
from engine.detokenizer import REPLACEMENT, Detokenizer, StopStrings
from engine.tokenizer import Tokenizer
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.llm.tiny_tokenizers import END, TEXTS, byte_level, sentence_piece

KINDS = {
    "byte_level": Tokenizer(byte_level(), frozenset()),
    "sentence_piece": Tokenizer(sentence_piece(), frozenset()),
}
SIZES = {kind: tokenizer._backend.get_vocab_size() for kind, tokenizer in KINDS.items()}
each_kind = pytest.mark.parametrize("kind", KINDS)


def streamed(tokenizer: Tokenizer, prompt: list[int], ids: list[int], *, skip_special: bool = True) -> list[str]:
    """The text after each token, and what the end flushes."""
    detokenizer = Detokenizer(tokenizer, prompt, skip_special=skip_special)
    return [*[detokenizer.push([token]) for token in ids], detokenizer.flush()]


def continuation(tokenizer: Tokenizer, prompt: list[int], ids: list[int], *, skip_special: bool = True) -> str:
    """What the answer adds to its prompt."""
    before = tokenizer.decode(prompt, skip_special=skip_special)
    return tokenizer.decode(prompt + ids, skip_special=skip_special)[len(before) :]


@each_kind
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_any_tokens_stream_to_what_they_decode_to(kind: str, data: st.DataObject) -> None:
    """Lone continuation bytes and broken characters, too.

    A sentencepiece decoder turns a whole run of bytes to U+FFFD when one more byte spoils it. What was sent can't be
    taken back, so there only what comes after the run is sure.
    """
    tokenizer = KINDS[kind]
    ids = data.draw(st.lists(st.integers(0, SIZES[kind] - 1), max_size=40))
    prompt = tokenizer.encode("The quick fox")
    skip_special = data.draw(st.booleans())
    pieces = streamed(tokenizer, prompt, ids, skip_special=skip_special)
    got, want = "".join(pieces), continuation(tokenizer, prompt, ids, skip_special=skip_special)
    if kind == "sentence_piece" and REPLACEMENT in want:
        got, want = got.rpartition(REPLACEMENT)[2], want.rpartition(REPLACEMENT)[2]
    assert got == want


@each_kind
@settings(max_examples=150, deadline=None)
@given(
    text=st.text(alphabet=st.sampled_from(sorted({c for text in TEXTS for c in text} | set("👩‍🚀ß€𝄞"))), max_size=25)
)
@example(text="👩‍👩‍👧‍👦")
@example(text="🇩🇪🇩🇪")
@example(text="東京タワー")
@example(text=" a  b ")
def test_valid_text_never_shows_half_a_character(kind: str, text: str) -> None:
    # exo#1691, ferrox#124: emoji across tokens streamed U+FFFD
    tokenizer = KINDS[kind]
    ids = tokenizer.encode(text, special=False)
    prompt = tokenizer.encode("The quick fox")
    pieces = streamed(tokenizer, prompt, ids)
    assert not any(REPLACEMENT in piece for piece in pieces)
    assert pieces[-1] == "", "all of it was out before the end"
    assert "".join(pieces) == continuation(tokenizer, prompt, ids)


@each_kind
@pytest.mark.parametrize("text", TEXTS)
def test_text_does_not_depend_on_how_tokens_arrive(kind: str, text: str) -> None:
    tokenizer = KINDS[kind]
    prompt, ids = tokenizer.encode("The dog"), tokenizer.encode(text, special=False)
    want = "".join(streamed(tokenizer, prompt, ids))
    rng = random.Random(0)
    for _ in range(20):
        detokenizer = Detokenizer(tokenizer, prompt)
        got, rest = "", list(ids)
        while rest:
            count = rng.randint(1, 5)
            got += detokenizer.push(rest[:count])
            rest = rest[count:]
        assert got + detokenizer.flush() == want


def test_a_character_comes_out_with_its_last_byte() -> None:
    tokenizer = KINDS["sentence_piece"]
    ids = [tokenizer._backend.token_to_id(f"<0x{byte:02X}>") for byte in "é👍".encode()]
    assert streamed(tokenizer, tokenizer.encode("dog"), ids) == ["", "é", "", "", "", "👍", ""]


def test_bytes_that_never_become_a_character_come_out_at_the_end() -> None:
    tokenizer = KINDS["sentence_piece"]
    ids = [tokenizer._backend.token_to_id(f"<0x{byte:02X}>") for byte in "👍".encode()[:3]]
    pieces = streamed(tokenizer, tokenizer.encode("dog"), ids)
    assert pieces[:3] == ["", "", ""]
    assert set(pieces[3]) == {REPLACEMENT}


def test_the_first_word_keeps_its_space_after_a_prompt() -> None:
    tokenizer = KINDS["sentence_piece"]
    fox = tokenizer._backend.token_to_id("▁fox")
    assert streamed(tokenizer, tokenizer.encode("The"), [fox, fox]) == [" fox", " fox", ""]
    assert streamed(tokenizer, [], [fox, fox]) == ["fox", " fox", ""]


@each_kind
def test_special_tokens_are_shown_on_request_only(kind: str) -> None:
    tokenizer = KINDS[kind]
    prompt, dog = tokenizer.encode("The"), tokenizer.encode("dog", special=False)
    end = tokenizer._backend.token_to_id(END)
    assert END not in "".join(streamed(tokenizer, prompt, [*dog, end, *dog]))
    assert END in "".join(streamed(tokenizer, prompt, [*dog, end, *dog], skip_special=False))


@each_kind
def test_a_token_that_no_vocabulary_knows_is_no_text(kind: str) -> None:
    # vllm#21951: it killed the stream
    tokenizer = KINDS[kind]
    prompt, dog = tokenizer.encode("The"), tokenizer.encode("dog", special=False)
    assert "".join(streamed(tokenizer, prompt, [*dog, 10**6, *dog])).count("dog") == 2


@each_kind
def test_a_long_stream_keeps_little(kind: str) -> None:
    tokenizer = KINDS[kind]
    prompt, ids = tokenizer.encode("The"), tokenizer.encode("\n".join(TEXTS * 30), special=False)
    assert len(ids) > 3000
    detokenizer = Detokenizer(tokenizer, prompt)
    text = "".join(detokenizer.push([token]) for token in ids)
    assert text + detokenizer.flush() == continuation(tokenizer, prompt, ids)
    assert len(detokenizer._ids) < 400


# Stop strings


def through(stops: list[str], chunks: list[str], *, include: bool = False) -> tuple[str, bool]:
    found = StopStrings(stops, include=include)
    text = "".join(found.push(chunk) for chunk in chunks)
    return text + found.flush(), found.stopped


def cut(text: str, stops: list[str], *, include: bool = False) -> tuple[str, bool]:
    """Letter by letter: the first moment at which the text ends with a stop string, the first listed wins."""
    for end in range(1, len(text) + 1):
        for stop in stops:
            if text[:end].endswith(stop):
                return text[: end if include else end - len(stop)], True
    return text, False


def splits(text: str) -> list[list[str]]:
    """Every way to cut a text into pieces."""
    ways = []
    for cuts in itertools.product([False, True], repeat=max(len(text) - 1, 0)):
        pieces, start = [], 0
        for index, is_cut in enumerate(cuts, start=1):
            if is_cut:
                pieces.append(text[start:index])
                start = index
        ways.append([*pieces, text[start:]])
    return ways


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize(
    ("text", "stops"),
    [
        ("hello END you", ["END"]),
        ("aaabaab", ["aab"]),  # overlaps itself
        ("abababac", ["ababac"]),
        ("xxSTOP", ["STOP"]),  # at the very end
        ("STOPxx", ["STOP"]),  # at the very start
        ("xxSTO", ["STOP"]),  # held back, and then no stop string
        ("xxSTOxSTx", ["STOP"]),
        ("one two", ["one two three", "two"]),  # a later one is complete first
        ("abcd", ["abc", "abcd", "ab"]),  # prefixes of one another
        ("xabcx", ["bc", "abc"]),  # complete at the same time
        ("xabcx", ["abc", "bc"]),
        ("no stop", ["zzz"]),
        ("anything", []),
        ("日本語です", ["語で"]),
        ("a\n\nb", ["\n\n"]),
    ],
)
def test_every_split_of_a_text_is_cut_at_the_same_place(text: str, stops: list[str], include: bool) -> None:
    # vllm#3574, TGI#1254: a stop string split across tokens leaked or was missed
    want = cut(text, stops, include=include)
    for chunks in splits(text):
        assert through(stops, chunks, include=include) == want, chunks


@settings(max_examples=400, deadline=None)
@given(
    chunks=st.lists(st.text(alphabet="ab", max_size=4), max_size=8),
    stops=st.lists(st.text(alphabet="ab", min_size=1, max_size=4), max_size=3),
    include=st.booleans(),
)
def test_random_texts_are_cut_where_the_definition_says(chunks: list[str], stops: list[str], include: bool) -> None:
    assert through(stops, chunks, include=include) == cut("".join(chunks), stops, include=include)


@settings(max_examples=200, deadline=None)
@given(
    text=st.text(alphabet="abc", max_size=12),
    stops=st.lists(st.text(alphabet="abc", min_size=1, max_size=4), max_size=3),
)
def test_no_more_is_held_back_than_may_become_a_stop_string(text: str, stops: list[str]) -> None:
    found = StopStrings(stops)
    out = ""
    for index, letter in enumerate(text, start=1):
        out += found.push(letter)
        if found.stopped:
            break
        held = text[len(out) : index]
        assert out + held == text[:index]
        assert not held or any(stop.startswith(held) and stop != held for stop in stops)


def test_nothing_comes_after_a_stop_string() -> None:
    found = StopStrings(["b"])
    assert found.push("abc") == "a"
    assert (found.push("more"), found.flush()) == ("", "")
