"""A deployment whose decode worker keeps int8 KV beside a prefill worker of bf16."""

from pathlib import Path

import pytest

from diptych import Client
from shared.engine.model_files import resolve_model
from tests.system.conftest import GoldenCase
from tests.system.fleet import PATIENT, Fleet, deployment
from tests.transport.kv_reference import TwoEngines

pytestmark = [pytest.mark.system, pytest.mark.timeout(300)]


def test_split_with_converted_kv_equals_converting_in_one_process(
    golden: list[GoldenCase],
) -> None:
    """Guards the real model's KV on its way from bf16 to int8: the text may not tell the way."""
    sections = {"prefill": {"kv_dtype": "bf16"}, "decode": {"kv_dtype": "int8"}}
    fleet = Fleet(
        deployment(
            {"prefill": 1, "decode": 1}, workers=sections, router=PATIENT | {"split_threshold": 1}
        )
    )
    chosen = [case for case in golden if len(case.prompt_ids) > 16][:4]
    directory = Path(resolve_model("smollm2-135m-instruct"))
    engines = TwoEngines(directory, ("bf16", "int8"), 16, 1024)
    expected = [engines.tokens(tuple(case.prompt_ids), 24) for case in chosen]
    engines.close()
    fleet.start()
    try:
        with Client(fleet.client_endpoint) as client:
            for case, tokens in zip(chosen, expected, strict=True):
                out = client.generate(list(case.prompt_ids), max_tokens=24, temperature=0.0)
                assert out.token_ids and list(out.token_ids) == tokens[: len(out.token_ids)]
    finally:
        fleet.stop()
        fleet.remove()
