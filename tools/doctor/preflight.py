"""The checks that must pass before ``diptych up`` starts anything."""

from rich.console import Console

from shared.config import Deployment
from shared.known_models import KNOWN_MODELS
from tools.doctor.deployment import check_endpoints, check_memory, check_port
from tools.doctor.machine import check_shared_memory
from tools.doctor.model import inspect_model
from tools.fetch.fetch import fetch, is_fetched


def require_machine(deployment: Deployment) -> None:
    """Raise ``DiptychError`` with one sentence unless ports and shared memory are there."""
    check_port(deployment.gateway.http)
    check_endpoints(deployment)
    check_shared_memory()


def prepare_model(deployment: Deployment, console: Console) -> None:
    """Fetch a known model that is not there, check its files, and that it fits into memory.

    Raises:
        DiptychError: no model, a damaged one, or too little memory.
    """
    known = KNOWN_MODELS.get(deployment.model.path)
    if known is not None and not is_fetched(known):
        fetch(known, console)
    files = inspect_model(deployment.model.path)
    check_memory(deployment, files.parameters)
