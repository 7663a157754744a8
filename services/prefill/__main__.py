"""Prompt processing: computes KV, samples token 1, holds the KV for a decode worker."""

import asyncio
import sys

from shared.config import load_deployment
from shared.service import parse_arguments, run_service
from shared.worker.service import run_worker
from shared.worker.settings import worker_settings


def main() -> int:
    """Run one worker and return its exit code."""
    arguments = parse_arguments("prefill")

    async def work(stop: asyncio.Event) -> None:
        deployment = load_deployment(arguments.config)
        await run_worker(worker_settings(deployment, arguments.name, ("prefill",)), stop)

    name = arguments.name or "prefill"
    return run_service(work, name, die_with_parent=arguments.die_with_parent)


if __name__ == "__main__":
    sys.exit(main())
