"""What ``precision: auto`` is, and what it means for keys and values."""

import pytest

import shared.precision
from shared.config import Deployment, WorkerSection, WorkersSection
from shared.messages.fleet import Role
from shared.precision import Precision, PrecisionRule, chosen_precision, kv_dtype_for
from shared.worker.settings import worker_settings


@pytest.mark.parametrize(
    ("role", "device", "flags", "chosen"),
    [
        ("prefill", "cpu", {"avx2", "amx_bf16"}, "bf16"),
        ("prefill", "cpu", {"avx512f"}, "int8"),
        ("decode", "cpu", {"amx_bf16"}, "int8"),
        ("mixed", "cpu", {"amx_bf16"}, "int8"),
        ("prefill", "cpu", set(), "int8"),
        ("decode", "cuda:1", set(), "bf16"),
    ],
)
def test_auto_is_what_this_machine_runs_fastest(
    monkeypatch: pytest.MonkeyPatch, role: Role, device: str, flags: set[str], chosen: Precision
) -> None:
    monkeypatch.setattr(shared.precision, "cpu_flags", lambda: frozenset(flags))
    assert chosen_precision("auto", role, device) == chosen


@pytest.mark.parametrize("rule", ["fp32", "int4"])
def test_a_named_precision_is_taken_at_its_word(rule: PrecisionRule) -> None:
    assert chosen_precision(rule, "prefill", "cpu") == rule


def test_roles_that_choose_for_themselves_still_fit_together() -> None:
    """Prefill may choose bf16 where decode chooses int8: keys and values are bf16 either way."""
    worker = WorkerSection(precision="auto")
    both = WorkersSection(prefill=worker, decode=worker)
    deployment = Deployment(name="d", deployment_type="split", workers=both)
    roles: tuple[Role, ...] = ("prefill", "decode")
    for role in roles:
        settings = worker_settings(deployment, None, (role,))
        assert settings.precision == chosen_precision("auto", role, "cpu")
        assert settings.kv_dtype == "bf16" == kv_dtype_for("auto", None)
