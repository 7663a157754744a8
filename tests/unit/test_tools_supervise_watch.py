"""What the user is told about processes, from snapshots alone."""

from tools.supervise.control import ProcessState
from tools.supervise.observe import MAX_STARTS, BecameReady, Ended, Failed, Ready, Watch


def state(pid: int, name: str = "RUNNING", status: int = 0) -> dict[str, ProcessState]:
    return {
        "a": ProcessState(
            name="a", group="a", statename=name, pid=pid, exitstatus=status, start=0, now=0
        )
    }


def ready(pid: int) -> dict[str, Ready]:
    return {"a": Ready(pid=pid, incarnation=1)}


def test_ready_once_then_silent() -> None:
    watch = Watch(["a"], 10.0)
    assert watch.update(state(7), {}, 11.0) == []
    assert not watch.all_ready
    assert watch.update(state(7), ready(7), 12.5) == [
        BecameReady(name="a", pid=7, seconds=2.5, again=False)
    ]
    assert watch.all_ready
    assert watch.update(state(7), ready(7), 13.0) == []


def test_a_stale_ready_file_is_no_readiness() -> None:
    """Guards: the file of a killed process must not announce its successor."""
    watch = Watch(["a"], 0.0)
    assert watch.update(state(8), ready(7), 1.0) == []
    assert not watch.all_ready


def test_restart_is_told_as_end_and_new_readiness() -> None:
    watch = Watch(["a"], 0.0)
    watch.update(state(7), ready(7), 1.0)
    assert watch.update(state(0, "EXITED", -1), ready(7), 2.0) == [Ended(name="a", pid=7)]
    assert watch.update(state(8), ready(8), 5.0) == [
        BecameReady(name="a", pid=8, seconds=3.0, again=True)
    ]


def test_a_restart_between_two_looks_is_told_too() -> None:
    watch = Watch(["a"], 0.0)
    watch.update(state(7), ready(7), 1.0)
    assert watch.update(state(8), ready(8), 2.0) == [
        Ended(name="a", pid=7),
        BecameReady(name="a", pid=8, seconds=0.0, again=True),
    ]


def test_refusal_is_final() -> None:
    watch = Watch(["a"], 0.0)
    assert watch.update(state(0, "EXITED", 2), {}, 1.0) == [Failed(name="a", reason="refused")]


def test_a_crash_loop_is_given_up() -> None:
    """Guards: a process that never becomes ready is not started for ever."""
    watch = Watch(["a"], 0.0)
    for pid in range(1, MAX_STARTS + 1):
        assert watch.update(state(pid), {}, float(pid)) == []
    assert watch.update(state(99), {}, 99.0) == [Failed(name="a", reason="crashed")]


def test_crashes_after_readiness_count_anew() -> None:
    watch = Watch(["a"], 0.0)
    for pid in range(1, 3 * MAX_STARTS):
        events = watch.update(state(pid), ready(pid), float(pid))
        assert not any(isinstance(event, Failed) for event in events)
