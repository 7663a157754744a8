"""Prompt processing: computes KV, samples token 1, holds the KV for a decode worker."""

import asyncio
import sys

from shared.config import load_deployment
from shared.messages.fleet import Role
from shared.naming import worker_name
from shared.service import parse_arguments, run_service, set_up_logging
from shared.worker.service import run_worker
from shared.worker.settings import worker_settings

ROLES: tuple[Role, ...] = ("prefill",)


def main() -> int:
    """Run one worker and return its exit code."""
    arguments = parse_arguments("prefill")

    async def work(stop: asyncio.Event) -> None:
        deployment = load_deployment(arguments.config)
        with worker_name(deployment, arguments.name, ROLES) as (deployment, name):
            set_up_logging(name or "prefill")
            await run_worker(worker_settings(deployment, name, ROLES), stop)

    name = arguments.name or "prefill"
    return run_service(work, name, die_with_parent=arguments.die_with_parent)


if __name__ == "__main__":
    sys.exit(main())
