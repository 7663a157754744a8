"""``python -m services.router --config FILE``: admission, placement, recovery."""

import asyncio
import logging
import sys

import zmq

from services.router.config import router_config
from services.router.service import RouterService
from shared.clock import MonotonicClock
from shared.config import Deployment, load_deployment
from shared.errors import DiptychError
from shared.ids import new_incarnation
from shared.runtime import (
    host_id,
    router_gateways_endpoint,
    router_workers_endpoint,
    runtime_dir,
)
from shared.service import EXIT_REFUSED, ReadyFile, parse_arguments, run_service, settle_heap

log = logging.getLogger(__name__)


async def serve(deployment: Deployment, name: str, stop: asyncio.Event) -> None:
    """Run one router until ``stop`` is set and everything open has ended."""
    incarnation = new_incarnation()
    directory = runtime_dir(deployment)
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    ready = ReadyFile(directory, name)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    service = RouterService(
        router_config(deployment), incarnation, context, host_id(), MonotonicClock()
    )
    try:
        gateways = router_gateways_endpoint(deployment)
        workers = router_workers_endpoint(deployment)
        service.bind(gateways, workers, deployment.security)
        settle_heap()
        ready.write(incarnation)
        log.info("ready: gateways at %s, workers at %s", gateways, workers)
        await service.run(stop)
    finally:
        ready.remove()
        service.close()
        context.destroy(linger=0)


def main() -> int:
    """Read the command line and run; the return value is the exit code."""
    arguments = parse_arguments("router")
    name = arguments.name or "router"
    try:
        deployment = load_deployment(arguments.config)
    except DiptychError as error:
        print(f"error: {error.message}", file=sys.stderr)
        return EXIT_REFUSED
    return run_service(
        lambda stop: serve(deployment, name, stop),
        name,
        die_with_parent=arguments.die_with_parent,
    )


if __name__ == "__main__":
    sys.exit(main())
