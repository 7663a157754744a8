"""Streamed text on a terminal: nothing is lost, and no word is cut that fits a line."""

import re

from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from tools.wrap import WordWrap

WIDTH = 10
PIECES = st.lists(st.text(st.sampled_from("ab. \n\u4e2d\U0001f600"), max_size=7), max_size=12)


def show(written: str) -> list[str]:
    """Return the lines a terminal shows: text, newlines, cursor back and erase to the end."""
    lines = [""]
    for text, back in re.findall(r"([^\x1b]+)|\x1b\[(\d+)D\x1b\[K", written):
        if back:
            columns = int(back)
            while columns > 0:
                columns -= cell_len(lines[-1][-1])
                lines[-1] = lines[-1][:-1]
            assert columns == 0
            continue
        first, *rest = text.split("\n")
        lines[-1] += first
        lines += rest
    return lines


def test_a_word_that_outgrows_its_line_moves_to_the_next() -> None:
    wrap = WordWrap(WIDTH)
    written = [wrap.feed(piece) for piece in ("The qu", "ick br", "own", " fox")]
    assert written[0] == "The qu"
    assert [line.rstrip() for line in show("".join(written))] == ["The quick", "brown fox"]


def test_a_word_longer_than_a_line_is_cut() -> None:
    assert show(WordWrap(4).feed("abcdefghij")) == ["abcd", "efgh", "ij"]


@given(PIECES)
def test_nothing_is_lost_and_words_stay_whole(pieces: list[str]) -> None:
    wrap, text = WordWrap(WIDTH), "".join(pieces)
    lines = show("".join(wrap.feed(piece) for piece in pieces))
    assert "".join("".join(lines).split()) == "".join(text.split())
    assert all(cell_len(line) <= WIDTH for line in lines)
    shown = [word for line in lines for word in line.split()]
    if all(cell_len(word) <= WIDTH for word in text.split()):
        assert shown == text.split()
