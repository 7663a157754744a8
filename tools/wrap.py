"""Break streamed text between words while it is being written to a terminal."""

from rich.cells import cell_len


class WordWrap:
    """Turns pieces of text into what a terminal must be sent to show them in ``width`` columns.

    Everything is shown at once. A word that outgrows its line is erased and written on the next.
    ``width`` is below the terminal's own: in its last column a cursor does not move as it should.
    """

    def __init__(self, width: int) -> None:
        self._width = max(width, 1)
        self._column = 0
        self._word = ""

    def feed(self, text: str) -> str:
        """Return text and control sequences for the next piece."""
        return "".join(map(self._character, text))

    def _character(self, character: str) -> str:
        if character == "\n":
            self._column, self._word = 0, ""
            return "\n"
        if character.isspace():
            self._word = ""
            return self._put(" ") if self._column < self._width else ""
        if self._column + cell_len(character) <= self._width:
            self._word += character
            return self._put(character)
        word, self._column = self._word, 0
        if cell_len(word) + cell_len(character) > self._width:
            self._word = character
            return "\n" + self._put(character)
        self._word += character
        back = f"\x1b[{cell_len(word)}D\x1b[K" if word else ""
        return f"{back}\n{self._put(self._word)}"

    def _put(self, text: str) -> str:
        self._column += cell_len(text)
        return text
