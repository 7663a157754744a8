"""Output that fits no message."""

from hypothesis import given
from hypothesis import strategies as st

from shared.ids import DispatchId
from shared.messages.request import PhaseTimes
from shared.messages.router_worker import SequenceFinished, StepOutput, TokenOut
from shared.worker.oversize import divide


@given(
    tokens=st.lists(st.tuples(st.integers(1, 5), st.integers(0, 9)), max_size=20),
    finished=st.sets(st.integers(1, 5)),
    large=st.sets(st.integers(1, 5)),
)
def test_what_fits_is_kept_in_order_and_the_rest_fails_by_name(
    tokens: list[tuple[int, int]], finished: set[int], large: set[int]
) -> None:
    output = StepOutput(
        step=3,
        tokens=tuple(TokenOut(DispatchId(d), i, t) for i, (d, t) in enumerate(tokens)),
        finished=tuple(
            SequenceFinished(
                dispatch=DispatchId(d), reason="stop", num_cached_tokens=0, times=PhaseTimes()
            )
            for d in sorted(finished)
        ),
    )

    def fits(part: StepOutput) -> bool:
        return not large & {t.dispatch for t in part.tokens}

    parts, lost = divide(output, fits)
    concerned = {d for d, _ in tokens} | finished
    assert set(lost) == large & {d for d, _ in tokens}
    for dispatch in concerned:
        (mine,) = [p for p in parts if dispatch in _dispatches(p)]
        assert _dispatches(mine) == {dispatch} and mine.step == 3
        if dispatch in lost:
            assert not mine.tokens and not mine.finished
            assert [f.error.code for f in mine.failed] == ["too_large"]
        else:
            assert list(mine.tokens) == [t for t in output.tokens if t.dispatch == dispatch]
            assert bool(mine.finished) == (dispatch in finished)


def _dispatches(part: StepOutput) -> set[int]:
    kinds = (part.tokens, part.prefilled, part.finished, part.failed)
    return {int(item.dispatch) for items in kinds for item in items}
