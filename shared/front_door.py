"""Who may come in by the gateway's address: checked by the gateway, and before a start."""

import ipaddress

from shared.config import Deployment
from shared.errors import BadConfig
from shared.units import parse_address


def check_front_door(deployment: Deployment) -> None:
    """Check keys, operators and that no stranger gets in.

    Raises:
        BadConfig: with the keys to change.
    """
    section = deployment.gateway
    _check_keys(section.api_keys)
    unknown = sorted(set(section.operators) - set((section.api_keys or {}).values()))
    if unknown:
        raise BadConfig(f"`gateway.operators` names {unknown}, which no `gateway.api_keys` has")
    open_to_all = section.api_keys is None and not section.allow_anonymous
    if open_to_all and not _is_loopback(parse_address(section.http)[0]):
        raise BadConfig(
            f"`gateway.http: {section.http}` can be reached from other machines: set "
            "`gateway.api_keys` (key: tenant), or listen on 127.0.0.1, or, where something "
            "else keeps strangers out, set `gateway.allow_anonymous: true`"
        )


def _check_keys(keys: dict[str, str] | None) -> None:
    for key, tenant in (keys or {}).items():
        if not key or key != key.strip() or not tenant:
            raise BadConfig(
                "`gateway.api_keys` maps non-empty keys without surrounding spaces to "
                "non-empty tenant names"
            )


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
