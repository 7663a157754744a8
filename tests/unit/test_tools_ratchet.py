"""The size limits find what they are for."""

from tools.ratchet import check_median, check_source


def breaches(text: str, name: str = "shared/x.py") -> list[str]:
    return list(check_source(name, text))


def test_long_file_is_found() -> None:
    assert breaches("x = 1\n" * 400) == []
    assert breaches("x = 1\n" * 401) == ["shared/x.py:1: 401 lines, 400 allowed"]


def test_long_function_is_found_with_its_line() -> None:
    body = "    x = 1\n"
    assert breaches("def f():\n" + body * 59) == []
    assert breaches("\ndef f():\n" + body * 60) == ["shared/x.py:2: f has 61 lines, 60 allowed"]


def test_parameters_count_without_self() -> None:
    """Guards: keyword-only and star parameters are parameters too."""
    fine = "class A:\n    async def f(self, a, b, c, d, *, e, f, g): ...\n"
    assert breaches(fine) == []
    assert breaches("def f(a, b, c, d, /, e, *f, g, **h): ...\n") == [
        "shared/x.py:1: f has 8 parameters, 7 allowed"
    ]


def test_any_is_refused_in_messages_only() -> None:
    text = "from typing import Any\nimport typing\nx: Any = 1\ny: typing.Any = 2\n"
    assert len(breaches(text, "shared/messages/x.py")) == 3
    assert breaches(text, "shared/kv/x.py") == []


def test_median_ignores_empty_files() -> None:
    assert list(check_median({"a": 0, "b": 0, "c": 150})) == []
    assert list(check_median({"a": 0, "b": 151})) == ["median file has 151 lines, 150 allowed"]
