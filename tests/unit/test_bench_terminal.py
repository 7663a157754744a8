"""Tables of ``diptych bench`` on consoles that are narrower than they are."""

import io

import msgspec
import pytest
from rich.console import Console
from rich.table import Table

from tools.bench.engine.report import as_table
from tools.bench.terminal import print_table
from tools.bench.transfer_plan import TransferRow
from tools.bench.transfer_report import table

NAME = "diptych-bf16-kv-int8"


def engines() -> Table:
    shapes = [f"decode B={batch} at 8,000, mixed" for batch in (1, 4, 16, 64)]
    cells = ["123,456.7", "(12,345)"]
    rows = [["engine", *shapes], [NAME, *[" ".join(cells)] * 4], ["vllm-cpu-w8a8", *["-"] * 4]]
    return as_table(rows, "", "")


def transfers() -> Table:
    figures = dict.fromkeys(TransferRow.__struct_fields__, 1234.5)
    names = {"path": "without pipeline", "codec": "cachegen", "tokens": 8192, "bytes": 1 << 30}
    return table([msgspec.convert(figures | names | {"wire": 1 << 30}, TransferRow)] * 2)


@pytest.mark.parametrize("width", [20, 80, 200])
@pytest.mark.parametrize("terminal", [True, False])
def test_no_word_of_a_table_is_cut(width: int, terminal: bool) -> None:
    """Guards names and figures that end in an ellipsis, or at the edge, at 80 columns."""
    out = io.StringIO()
    print_table(
        engines(), Console(file=out, width=width, force_terminal=terminal, color_system=None)
    )
    text = out.getvalue()
    assert "\u2026" not in text
    assert text.count(NAME) == 1
    assert [text.count(word) for word in ("123,456.7", "(12,345)", "8,000,")] == [4, 4, 4]
    if not terminal or width == 200:
        assert "decode B=64 at 8,000, mixed" in text and text.count("123,456.7 (12,345)") == 4


def test_what_fits_a_terminal_stays_inside() -> None:
    """Guards lines that run over the edge where cells could wrap between their words."""
    out = io.StringIO()
    print_table(engines(), Console(file=out, width=80, force_terminal=True, color_system=None))
    assert max(map(len, out.getvalue().splitlines())) <= 80


def test_the_rates_of_transfers_are_whole_on_a_terminal() -> None:
    """Guards columns that vanish beyond the edge: 14 of them stand beside one another."""
    out = io.StringIO()
    print_table(transfers(), Console(file=out, width=80, force_terminal=True, color_system=None))
    text = out.getvalue()
    assert "\u2026" not in text
    assert [text.count(word) for word in ("cachegen", "1234500.0", "8,192")] == [2, 8, 2]
