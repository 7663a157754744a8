"""What the container files promise, as far as it can be read without an engine."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from shared.config import load_deployment

ROOT = Path(__file__).resolve().parents[2]
SERVICES: dict[str, dict[str, Any]] = yaml.safe_load((ROOT / "compose.yaml").read_text())[
    "services"
]
RUNNING = ("router", "prefill", "decode", "gateway")
ANCHORED = ("router", "prefill", "decode")


def test_each_service_is_a_container_that_is_asked_how_it_is() -> None:
    """Guards a service that nobody restarts, or that counts as well although it is not."""
    assert set(SERVICES) == {"anchor", "keys", "models", *RUNNING}
    for name in RUNNING:
        service = SERVICES[name]
        command = " ".join([*service.get("entrypoint", []), *service["command"]])
        assert f"services.{name} " in f"{command} "
        assert service["healthcheck"]["test"][:4] == ["CMD", "python", "-m", "tools.health"]
        assert service["restart"] == "unless-stopped"
        assert "no-new-privileges:true" in service["security_opt"]


def test_workers_share_the_namespaces_of_a_service_that_never_restarts() -> None:
    """Guards pools that no other container can open, or that a restart of their owner empties."""
    assert SERVICES["anchor"]["ipc"] == "shareable"
    assert SERVICES["anchor"]["command"] == ["sleep", "infinity"]
    for name in ANCHORED:
        assert SERVICES[name]["ipc"] == SERVICES[name]["pid"] == "service:anchor"


def test_a_stop_leaves_time_to_drain() -> None:
    """Guards streams that the engine cuts before the worker has handed them over."""
    drain = load_deployment(ROOT / "configs" / "compose.yaml").router.drain_timeout
    for name in RUNNING:
        assert float(SERVICES[name]["stop_grace_period"].removesuffix("s")) > drain


def test_keys_are_read_only_and_every_link_uses_them() -> None:
    security = load_deployment(ROOT / "configs" / "compose.yaml").security
    for name in RUNNING:
        assert f"keys:{security.keys}:ro" in SERVICES[name]["volumes"]


@pytest.mark.parametrize("name", RUNNING)
def test_an_edit_restarts_the_service_that_was_edited(name: str) -> None:
    watched = {rule["path"]: rule["action"] for rule in SERVICES[name]["develop"]["watch"]}
    assert watched[f"services/{name}"] == watched["shared"] == "sync+restart"
    assert not {f"services/{other}" for other in RUNNING if other != name} & set(watched)
    assert all((ROOT / path).exists() for path in watched)


def test_gpus_are_reserved_for_both_workers_and_nobody_else() -> None:
    """Guards an override whose services have other names by now: it would start a third worker."""
    override = yaml.safe_load((ROOT / "compose.gpu.yaml").read_text())["services"]
    assert set(override) == {"prefill", "decode"}
    for service in override.values():
        (wanted,) = service["deploy"]["resources"]["reservations"]["devices"]
        assert wanted["driver"] == "nvidia" and wanted["capabilities"] == ["gpu"]


def test_the_image_runs_as_a_user_without_rights() -> None:
    text = (ROOT / "Dockerfile").read_text()
    stages = re.split(r"(?m)^FROM ", text)
    assert len(stages) > 2, "what compilers need stays in a stage of its own"
    assert re.findall(r"(?m)^USER (\S+)", stages[-1]) == ["diptych"]
    assert re.search(r"(?m)^HEALTHCHECK ", stages[-1])
    assert re.match(r"python:\d+\.\d+-\S+ AS base", stages[1]), "a version is named"
