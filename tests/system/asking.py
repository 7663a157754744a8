"""Send golden prompts through the SDK and compare what comes back."""

from concurrent.futures import Future
from typing import Any

from diptych import Client, Completion
from tests.system.conftest import GoldenCase
from tests.system.fleet import Fleet

GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}
SAMPLED: dict[str, Any] = {"temperature": 0.9, "top_p": 0.95, "top_k": 50, "ignore_eos": True}


def submit(client: Client, case: GoldenCase, **params: Any) -> Future[Completion]:
    """Start one completion of the case's prompt."""
    return client.submit(list(case.prompt_ids), timeout=300.0, **params)


def answers(fleet: Fleet, cases: list[GoldenCase], at_once: int, **params: Any) -> list[Completion]:
    """Complete all cases, ``at_once`` at a time, in order."""
    with Client(fleet.client_endpoint, timeout=300.0) as client:
        return client.generate_batch(
            [list(case.prompt_ids) for case in cases],
            max_in_flight=at_once,
            progress=False,
            **params,
        )


def assert_golden(cases: list[GoldenCase], got: list[Completion]) -> None:
    """Every answer equals the reference, ties apart (they are printed)."""
    wrong = [case.explain(list(c.token_ids)) for case, c in zip(cases, got, strict=True)]
    assert not any(wrong), "\n".join(w for w in wrong if w)
