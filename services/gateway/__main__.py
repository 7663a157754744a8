"""``python -m services.gateway --config FILE [--name gateway]``."""

import asyncio
import sys

from services.gateway.config import gateway_config
from services.gateway.service import serve
from shared.config import load_deployment
from shared.ids import GatewayId
from shared.service import parse_arguments, run_service


def main() -> int:
    """Run the gateway and return its exit code."""
    arguments = parse_arguments("gateway")
    name = arguments.name or "gateway"

    async def run(stop: asyncio.Event) -> None:
        config = gateway_config(load_deployment(arguments.config))
        await serve(config, GatewayId(name), stop)

    return run_service(run, name, die_with_parent=arguments.die_with_parent)


if __name__ == "__main__":
    sys.exit(main())
