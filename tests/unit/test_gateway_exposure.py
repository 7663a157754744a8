"""A gateway that strangers can reach never goes without keys unless the file says so."""

import pytest

from services.gateway.config import gateway_config
from shared.config import Deployment, GatewaySection
from shared.errors import BadConfig


def deployment(**gateway: object) -> Deployment:
    section = GatewaySection(**gateway)  # type: ignore[arg-type]
    return Deployment(name="d", deployment_type="split", gateway=section)


@pytest.mark.parametrize("host", ["0.0.0.0", "[::]", "192.0.2.7", "gateway"])
def test_other_machines_need_keys_or_consent(host: str) -> None:
    http = f"{host}:8000"
    with pytest.raises(BadConfig, match="allow_anonymous: true"):
        gateway_config(deployment(http=http))
    for consent in ({"allow_anonymous": True}, {"api_keys": {"k": "tenant"}}):
        assert gateway_config(deployment(http=http, **consent)).port == 8000


def test_loopback_needs_neither() -> None:
    assert gateway_config(deployment(http="127.0.0.1:8000")).api_keys is None


def test_operators_must_be_tenants_that_have_a_key() -> None:
    """A misspelt name would lock the operator out, or wait for somebody to take it."""
    keys = {"k": "red"}
    with pytest.raises(BadConfig, match="blue"):
        gateway_config(deployment(api_keys=keys, operators=("blue",)))
    assert gateway_config(deployment(api_keys=keys, operators=("red",))).operators == ("red",)
