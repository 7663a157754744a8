"""Deployments that whole test modules share: starting one costs seconds."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec import Struct

from shared.known_models import KNOWN_MODELS, known_model_file
from tests.nursery import kept
from tests.system.fleet import PATIENT, Fleet, deployment, serving

nursery = pytest.fixture(scope="session", autouse=True)(kept)

GOLDEN = Path(__file__).parent / "golden" / "greedy.json"
TIE = 1e-4
"""Two best logits closer than this may swap between implementations."""


class GoldenCase(Struct, frozen=True):
    """A prompt and what ``transformers.generate`` answers in fp32, with top-2 margins."""

    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...]
    margins: tuple[float, ...]

    def explain(self, got: list[int]) -> str | None:
        """Return None when equal or different only from a tie on (printed), else why not."""
        want = list(self.output_ids[: len(got)])
        if got == want:
            return None
        at = next(i for i, (a, b) in enumerate(zip(got, want, strict=True)) if a != b)
        where = f"prompt of {len(self.prompt_ids)}: token {at} is {got[at]}, want {want[at]}"
        if self.margins[at] <= TIE:
            print(f"tie, margin {self.margins[at]}: {where}")
            return None
        return f"{where} (margin {self.margins[at]})"


def read_golden() -> list[GoldenCase]:
    """Return the prompts of the reference, and what it answers."""
    cases = json.loads(GOLDEN.read_text())["cases"]
    return [GoldenCase(**{k: tuple(v) for k, v in case.items()}) for case in cases]


@pytest.fixture(scope="session")
def golden() -> list[GoldenCase]:
    return read_golden()


@pytest.fixture(scope="session", autouse=True)
def model_present() -> None:
    """The real model is part of these tests: `diptych fetch` brings it (make test does)."""
    path = known_model_file(KNOWN_MODELS["smollm2-135m-instruct"])
    if not path.exists():
        pytest.skip(f"model file {path} is absent: run `diptych fetch`")


@pytest.fixture(scope="session")
def colocated() -> Iterator[Fleet]:
    """One mixed worker whose small budget cuts prompts into chunks beside decodes."""
    workers = {"mixed": {"max_batch_tokens": 80}}
    yield from serving(Fleet(deployment({"mixed": 1}, workers=workers, router=PATIENT)))


@pytest.fixture(scope="session")
def split() -> Iterator[Fleet]:
    """1P1D; prompts are not cut into chunks."""
    workers = {"prefill": {"max_batch_tokens": 2048}}
    router = PATIENT | {"split_threshold": 0}
    tree = deployment({"prefill": 1, "decode": 1}, workers=workers, router=router)
    yield from serving(Fleet(tree))


@pytest.fixture(scope="session")
def split_2x2() -> Iterator[Fleet]:
    """2P2D with chunks of 48 tokens: a chunk border in the middle of blocks."""
    workers = {"prefill": {"max_batch_tokens": 48}}
    router = PATIENT | {"split_threshold": 0}
    tree = deployment({"prefill": 2, "decode": 2}, workers=workers, router=router)
    yield from serving(Fleet(tree))
