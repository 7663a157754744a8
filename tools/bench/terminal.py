"""Tables of figures on a terminal, or in a log where no terminal says its width."""

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table

_BESIDE = 3
"""Columns of the terminal that padding and lines take beside each of a table's."""


def print_table(table: Table, console: Console) -> None:
    """Print a table of which nothing is cut, however narrow the console.

    On a terminal cells wrap between words, and what then is still too wide runs over its edge.
    Elsewhere lines may be as long as they are.
    """
    least = 1
    for column in table.columns:
        cells = [str(column.header), *map(str, column.cells)]
        words = [word for cell in cells for word in cell.split()] if console.is_terminal else cells
        column.min_width = max(map(cell_len, words), default=0)
        # Where wrapping gains nothing the others are to wrap first.
        column.no_wrap = column.min_width == max(map(cell_len, cells))
        least += column.min_width + _BESIDE
    if least > console.width:
        table.width = least
    console.print(table, crop=False)
