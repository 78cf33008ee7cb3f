"""The tokenizer of examples/smollm2.py: pieces, merges, round trips."""

from __future__ import annotations

import codecs
from typing import Any

import pytest
from example_model import BYTES, CONTROL, MERGES, TOKENS, smollm2
from hypothesis import given
from hypothesis import strategies as st


@pytest.fixture
def tokenizer() -> Any:
    return smollm2.Tokenizer(TOKENS, MERGES, range(3), 0)


def names(tokenizer: Any, text: str) -> list[str]:
    return [tokenizer.tokens[index] for index in tokenizer.encode(text)]


def test_every_byte_has_a_printable_character_of_its_own():
    table = smollm2.byte_characters()
    assert sorted(table) == list(range(256))
    assert len(set(table.values())) == 256
    assert all(character.isprintable() and not character.isspace() for character in table.values())
    assert (table[ord("A")], table[ord(" ")], table[ord("\n")]) == ("A", "Ġ", "Ċ")


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("", []),
        ("hello world", ["hello", " world"]),
        ("  two  blanks ", [" ", " two", " ", " blanks", " "]),
        ("it's we'll I'D 'sure", ["it", "'s", " we", "'ll", " I", "'", "D", " '", "sure"]),
        ("'t're've'm'd've", ["'t", "'re", "'ve", "'m", "'d", "'ve"]),
        ("a 12.5%", ["a", " ", "1", "2", ".", "5", "%"]),
        ("x  7", ["x", "  ", "7"]),
        ("x²½Ⅷ 一二", ["x", "²", "½", "Ⅷ", " 一二"]),
        ("def f(x_1):\n\n    y", ["def", " f", "(", "x", "_", "1", "):", "\n\n   ", " y"]),
        ("naïve über 日本", ["naïve", " über", " 日本"]),
        ("a\u0301 \u00a0b\x1c", ["a", "\u0301", " ", "\u00a0", "b", "\x1c"]),
        ("a!? \x1c\x85 \u3000", ["a", "!?", " \x1c", "\x85 \u3000"]),
    ],
)
def test_pieces(text, pieces):
    assert list(smollm2.split_text(text)) == pieces


@given(st.text())
def test_pieces_lose_nothing(text):
    assert "".join(smollm2.split_text(text)) == text


def test_merges(tokenizer):
    assert names(tokenizer, "hello world") == ["hello", "Ġwor", "ld"]
    assert names(tokenizer, "hell hel") == ["hell", "Ġ", "he", "l"]
    assert names(tokenizer, "ä") == ["Ã¤"]
    assert names(tokenizer, "a" * 7) == ["aaaa", "aa", "a"]


def test_the_first_merge_wins():
    tokens = [*BYTES, "ab", "bc"]
    assert names(smollm2.Tokenizer(tokens, ["a b", "b c"], (), 0), "abc") == ["ab", "c"]
    assert names(smollm2.Tokenizer(tokens, ["b c", "a b"], (), 0), "abc") == ["a", "bc"]


@given(st.text(alphabet=st.characters(exclude_categories=["Cs"])))
def test_round_trip(text):
    tokenizer = smollm2.Tokenizer(TOKENS, MERGES, range(3), 0)
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_control_tokens_are_not_read_from_text(tokenizer):
    ids = tokenizer.encode("<|im_end|>")
    assert min(ids) > 2
    assert tokenizer.decode(ids) == "<|im_end|>"
    merged = smollm2.Tokenizer([*BYTES, "aa"], ["a a"], [256], 0)
    assert 256 not in merged.encode("aa")


def test_chat(tokenizer):
    start, end = 1, 2
    ids = tokenizer.chat("hello", system="aa")
    assert ids == [
        start, *tokenizer.encode("system\naa"), end, *tokenizer.encode("\n"),
        start, *tokenizer.encode("user\nhello"), end, *tokenizer.encode("\n"),
        start, *tokenizer.encode("assistant\n"),
    ]  # fmt: skip
    assert tokenizer.decode(ids) == "system\naa\nuser\nhello\nassistant\n"
    assert smollm2.SYSTEM_PROMPT in tokenizer.decode(tokenizer.chat("hello"))


def test_bytes_without_a_token_are_unknown():
    tokenizer = smollm2.Tokenizer([*CONTROL, *(c for c in BYTES if c != "z")], [], range(3), 0)
    assert names(tokenizer, "az") == ["a", "<|endoftext|>"]


def test_a_lone_surrogate_becomes_a_question_mark(tokenizer):
    assert tokenizer.decode(tokenizer.encode("a\udc80")) == "a\ufffd"


def test_a_character_may_come_in_parts(tokenizer):
    ids = tokenizer.encode("x😀ä")
    assert len(ids) == 6
    decoder = codecs.getincrementaldecoder("utf-8")()
    assert [decoder.decode(tokenizer.to_bytes(index)) for index in [1, *ids]] == ["", "x", "", "", "", "😀", "ä"]
