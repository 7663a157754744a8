"""Find the deployment that a command is about, and reach it."""

from pathlib import Path

import diptych
from shared.config import Deployment, load_deployment
from shared.errors import BadConfig, ResourceMissing
from shared.runtime import client_endpoint, runtime_dir
from tools.supervise.locks import read_owner
from tools.supervise.plan import run_paths


def find_deployment(config: Path | None, default: Path) -> Deployment:
    """Return the deployment of ``config``, else the one that runs, else ``default``.

    Raises:
        BadConfig: the file is wrong.
        ResourceMissing: several deployments run and none was named.
    """
    if config is not None:
        return load_deployment(config)
    fallback = load_deployment(default)
    owners = {}
    for lock in sorted(runtime_dir(fallback).parent.glob("*/up.lock")):
        owner = read_owner(lock)
        if owner is not None:
            owners[lock.parent.name] = owner
    if len(owners) > 1:
        raise ResourceMissing(
            f"several deployments run: {', '.join(owners)}; name one with --config FILE"
        )
    for owner in owners.values():
        return load_deployment(owner.config)
    return fallback


def is_supervised(deployment: Deployment) -> bool:
    """Say whether ``diptych up`` runs this deployment here."""
    return read_owner(run_paths(deployment).up_lock) is not None


def require_running(deployment: Deployment) -> None:
    """Raise ``ResourceMissing`` unless ``diptych up`` runs this deployment."""
    if not is_supervised(deployment):
        raise _does_not_run(deployment)


def require_gateway(deployment: Deployment) -> None:
    """Raise ``ResourceMissing`` where there is no gateway to ask: by ``up``, by hand, elsewhere."""
    endpoint = client_endpoint(deployment)
    elsewhere = endpoint.startswith("tcp://")
    by_hand = endpoint.startswith("ipc://") and Path(endpoint.removeprefix("ipc://")).exists()
    if not (is_supervised(deployment) or elsewhere or by_hand):
        raise _does_not_run(deployment)


def _does_not_run(deployment: Deployment) -> ResourceMissing:
    return ResourceMissing(
        f"deployment `{deployment.name}` does not run; start it with `diptych up` and its file"
    )


def client(
    deployment: Deployment, *, connect_timeout: float = 5.0, operator: bool = False
) -> diptych.Client:
    """Return an SDK client of the deployment, with its first key, or an operator's, if any."""
    endpoint = client_endpoint(deployment)
    keys = deployment.security.keys
    encrypted = endpoint.startswith("tcp://") or deployment.security.curve == "always"
    curve = diptych.Curve.from_directory(keys) if keys is not None and encrypted else None
    try:
        return diptych.Client(
            _reachable(endpoint),
            api_key=_key(deployment, operator=operator),
            curve=curve,
            connect_timeout=connect_timeout,
        )
    except diptych.DiptychError as error:
        raise BadConfig(f"cannot reach {endpoint}: {error}") from error


def _key(deployment: Deployment, *, operator: bool) -> str | None:
    keys, operators = deployment.gateway.api_keys or {}, deployment.gateway.operators
    fitting = (key for key, tenant in keys.items() if tenant in operators)
    return next(fitting if operator else iter(keys), next(iter(keys), None))


def _reachable(endpoint: str) -> str:
    return endpoint.replace("//*:", "//127.0.0.1:").replace("//0.0.0.0:", "//127.0.0.1:")
