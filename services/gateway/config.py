"""What the gateway needs from the deployment file."""

from pathlib import Path

from msgspec import Struct

from shared.config import Deployment, SecuritySection
from shared.errors import BadConfig
from shared.front_door import check_front_door
from shared.runtime import client_endpoint, router_gateways_endpoint, runtime_dir
from shared.units import parse_address


class GatewayConfig(Struct, frozen=True, kw_only=True):
    """Times are seconds. ``max_model_len`` None: the model's own.

    ``silence``: after so long without a word the router counts as gone.
    """

    host: str
    port: int
    client_endpoint: str
    router_endpoint: str
    runtime_dir: Path
    security: SecuritySection
    api_keys: dict[str, str] | None
    operators: tuple[str, ...]
    model_path: str
    served_name: str | None
    max_model_len: int | None
    max_body: int
    max_open: int
    request_timeout: float
    silence: float
    drain_timeout: float


def gateway_config(deployment: Deployment) -> GatewayConfig:
    """Cut the gateway's part out of a deployment.

    Raises:
        BadConfig: a malformed address, or one open to other machines without API keys.
    """
    section = deployment.gateway
    try:
        host, port = parse_address(section.http)
    except ValueError as error:
        raise BadConfig(f"`gateway.http`: {error}") from error
    check_front_door(deployment)
    return GatewayConfig(
        host=host,
        port=port,
        client_endpoint=client_endpoint(deployment),
        router_endpoint=router_gateways_endpoint(deployment),
        runtime_dir=runtime_dir(deployment),
        security=deployment.security,
        api_keys=section.api_keys,
        operators=section.operators,
        model_path=deployment.model.path,
        served_name=deployment.model.served_name,
        max_model_len=deployment.model.max_model_len,
        max_body=section.max_body,
        max_open=section.max_open,
        request_timeout=section.request_timeout,
        silence=deployment.router.worker_timeout,
        drain_timeout=deployment.router.drain_timeout,
    )
