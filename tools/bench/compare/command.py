"""The three jobs of ``diptych bench compare``: install, engines, servers."""

from collections.abc import Sequence
from pathlib import Path

from msgspec import Struct
from rich.console import Console

from shared.config import load_deployment
from shared.device.open import require_device
from shared.errors import BadConfig, DiptychError, ResourceMissing
from tools.bench.compare.engines import compare_engines
from tools.bench.compare.serving import compare_serving
from tools.bench.engine.figures import Plan
from tools.bench.engine.rounds import Entry
from tools.bench.peers.install import install, require
from tools.bench.peers.peer import Peer, require_on
from tools.bench.serve import Plan as ServePlan

_WORDS, _TOKENS = 400, 64
_TIMEOUT = 600.0


class Load(Struct, frozen=True, kw_only=True):
    """Clients at a time, per level; turns of every server; the file of our deployment."""

    levels: tuple[int, ...]
    rounds: int
    config: Path


def install_peers(peers: Sequence[Peer], console: Console) -> None:
    """Install all, whatever becomes of the others. Raises ``ResourceMissing`` if one failed."""
    problems = []
    for peer in peers:
        try:
            install(peer, console)
        except DiptychError as error:
            problems.append(error.message)
    if problems:
        raise ResourceMissing("; ".join(dict.fromkeys(problems)))


def engines(
    plan: Plan,
    ours: Sequence[Entry],
    peers: Sequence[Peer],
    out: Path,
    as_json: bool,
    console: Console,
) -> int:
    """Compare engines. Returns the exit code."""
    require(peers)
    require_on(plan.device, peers)
    require_device(plan.device)
    code = compare_engines(plan, ours, peers, out, console)
    return _shown(code, out, as_json)


def refuse_engines_options(device: str, precision: str | None, kv_dtype: str | None) -> None:
    """Raise ``BadConfig`` where servers are asked for what the deployment's file says of ours."""
    for option, given in (("device", device), ("precision", precision), ("kv-dtype", kv_dtype)):
        if given not in (None, "cpu"):
            raise BadConfig(
                f"--{option} {given} is for engines: with --serving the file of --config says it "
                "for ours, and peers' servers run on CPUs"
            )


def serving(load: Load, peers: Sequence[Peer], out: Path, as_json: bool, console: Console) -> int:
    """Compare servers. Returns the exit code."""
    require(peers)
    plan = ServePlan(
        input_words=_WORDS,
        output_tokens=_TOKENS,
        levels=load.levels,
        requests=None,
        seed=0,
        timeout=_TIMEOUT,
    )
    deployment = load_deployment(load.config)
    code = compare_serving(deployment, load.config, peers, plan, load.rounds, out, console)
    return _shown(code, out, as_json)


def _shown(code: int, out: Path, as_json: bool) -> int:
    if as_json:
        print(out.with_name(f"{out.name}.json").read_text(encoding="utf-8"), end="")
    return code
