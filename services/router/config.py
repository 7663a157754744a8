"""What the router needs from the deployment file."""

from typing import Literal

from msgspec import Struct

from shared.config import Deployment, DeploymentType


class RouterConfig(Struct, frozen=True, kw_only=True):
    """Policy and bounds; times are seconds, ``split_threshold``, ``spill_tokens`` and the queue
    count tokens.
    """

    deployment_type: DeploymentType = "split"
    split_threshold: int = 64
    max_queue: int = 256
    max_queued_tokens: int = 262_144
    spill_tokens: int | None = 4096
    on_no_prefill: Literal["local", "wait", "fail"] = "local"
    max_retries: int = 8
    worker_timeout: float = 5.0
    hung_after: float = 30.0
    drain_timeout: float = 30.0
    no_worker_timeout: float = 30.0


def router_config(deployment: Deployment) -> RouterConfig:
    """Cut the router's part out of a deployment."""
    section = deployment.router
    return RouterConfig(
        deployment_type=deployment.deployment_type,
        split_threshold=section.split_threshold,
        max_queue=section.max_queue,
        max_queued_tokens=section.max_queued_tokens,
        spill_tokens=section.spill_tokens,
        on_no_prefill=section.on_no_prefill,
        max_retries=section.max_retries,
        worker_timeout=section.worker_timeout,
        hung_after=section.hung_after,
        drain_timeout=section.drain_timeout,
        no_worker_timeout=section.no_worker_timeout,
    )
