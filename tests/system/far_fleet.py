"""A deployment on two hosts: its first prefill worker runs in a network namespace."""

from typing import Any

import yaml

from shared.transport.security import generate_keys
from tests.system.fleet import Fleet
from tools.slow_link.hosts import Hosts


class FarFleet(Fleet):
    """Only prefill-0 is on the far host; everything between the hosts is encrypted."""

    def __init__(self, tree: dict[str, Any], hosts: Hosts) -> None:
        super().__init__(tree)
        self._hosts = hosts
        self._far_config = self.home / "far.yaml"
        self.tree["security"] = {"keys": str(generate_keys(self.home / "keys"))}
        for config, address in ((self.config, hosts.near), (self._far_config, hosts.far)):
            endpoints = {
                "router_workers": f"tcp://{hosts.near}:5620",
                "kv": "tcp://0.0.0.0:7440",
                "advertise": address,
            }
            config.write_text(yaml.safe_dump(self.tree | {"endpoints": endpoints}))

    def command(self, name: str) -> list[str]:
        words = super().command(name)
        if name != "prefill-0":
            return words
        near, far = str(self.config), str(self._far_config)
        return [*self._hosts.inside, *(far if word == near else word for word in words)]
