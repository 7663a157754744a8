"""Threads whose turns fail."""

from shared.transport.bulk.stumbles import Stumbles


def test_a_thread_whose_every_turn_fails_rests() -> None:
    """Guards a socket that is gone: a million tracebacks a minute, and a core that writes them."""
    rests: list[float] = []
    stumbles = Stumbles(rests.append)
    for _ in range(20):
        stumbles.another()
    assert len(rests) == 19, "the first alone costs no time"
    assert rests == sorted(rests) and rests[0] > 0 and rests[-1] == 1.0
    stumbles.none()
    stumbles.another()
    assert len(rests) == 19, "one that went well forgives those before"
