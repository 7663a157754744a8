"""The deployment file: one typed, frozen tree; unknown fields and bad values are refused.

Each service cuts its own small config out of this tree (``services/<name>/config.py``) and
hands its parts single values; the tree itself is not passed around.
"""

import re
from pathlib import Path
from typing import Annotated, Literal, NewType

import msgspec
from msgspec import Meta, Struct

from shared.errors import BadConfig

Seconds = NewType("Seconds", float)
ByteSize = NewType("ByteSize", int)

Precision = Literal["fp32", "bf16", "fp16"]
DeploymentType = Literal["colocated", "split"]
Positive = Annotated[int, Meta(ge=1)]
NonNegative = Annotated[int, Meta(ge=0)]


class ModelSection(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``path``: safetensors directory, GGUF file, or a name that ``diptych fetch`` knows."""

    path: str = "smollm2-135m-instruct"
    served_name: str | None = None
    max_model_len: Positive | None = None
    block_size: Annotated[int, Meta(ge=1, le=256)] = 16


class WorkerSection(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One role. ``threads``/``cores`` default to an even share of the machine's cores."""

    count: NonNegative = 1
    device: Literal["cpu"] = "cpu"
    precision: Precision = "bf16"
    threads: Positive | None = None
    cores: tuple[tuple[int, ...], ...] | None = None
    kv_memory: ByteSize = ByteSize(512 << 20)
    max_batch_tokens: Positive = 512
    max_sequences: Positive = 64


class WorkersSection(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which roles exist. ``split`` needs prefill and decode, ``colocated`` needs mixed."""

    prefill: WorkerSection | None = None
    decode: WorkerSection | None = None
    mixed: WorkerSection | None = None


class TransferSection(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """KV hand-over. ``notify_layers``: layers per ready notification while prefill computes."""

    path: Literal["ipc"] = "ipc"
    pipeline: bool = True
    notify_layers: Positive = 8
    lease: Seconds = Seconds(30.0)
    heartbeat: Seconds = Seconds(5.0)


class ReuseSection(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """KV reuse inside a worker."""

    prefix: bool = True


class RouterSection(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Admission and placement.

    A prompt with fewer than ``split_threshold`` uncached tokens is not split.
    ``on_no_prefill``: what to do when no prefill worker is ready.
    """

    split_threshold: NonNegative = 64
    max_queue: Positive = 256
    max_queued_tokens: Positive = 262_144
    on_no_prefill: Literal["local", "wait", "fail"] = "local"
    max_retries: NonNegative = 8
    worker_timeout: Seconds = Seconds(5.0)
    hung_after: Seconds = Seconds(30.0)
    drain_timeout: Seconds = Seconds(30.0)


class GatewaySection(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Front door. ``api_keys``: key -> tenant; absent means one local tenant, no key asked."""

    http: str = "127.0.0.1:8000"
    zmq: str | None = None
    api_keys: dict[str, str] | None = None
    max_body: ByteSize = ByteSize(8 << 20)
    max_open: Positive = 1024
    request_timeout: Seconds = Seconds(600.0)


class EndpointsSection(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Control endpoints; absent ones are ipc sockets in ``runtime_dir``."""

    router_gateways: str | None = None
    router_workers: str | None = None


class SecuritySection(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``keys``: directory made by ``diptych keys``; needed for every non-loopback TCP endpoint."""

    curve: Literal["auto", "always"] = "auto"
    keys: str | None = None


class Deployment(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A whole deployment as written in ``configs/*.yaml``."""

    name: Annotated[str, Meta(pattern=r"^[a-z0-9-]{1,32}$")]
    deployment_type: DeploymentType
    model: ModelSection = ModelSection()
    workers: WorkersSection = WorkersSection()
    transfer: TransferSection = TransferSection()
    kv_reuse: ReuseSection = ReuseSection()
    router: RouterSection = RouterSection()
    gateway: GatewaySection = GatewaySection()
    endpoints: EndpointsSection = EndpointsSection()
    security: SecuritySection = SecuritySection()
    runtime_dir: str | None = None


_UNITS = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_TIMES = {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}


def parse_size(text: object) -> ByteSize:
    """Read ``512MiB``, ``8GiB`` or a plain number of bytes."""
    match = re.fullmatch(r"(\d+)\s*(B|KiB|MiB|GiB|TiB)?", str(text).strip())
    if match is None:
        raise ValueError(f"expected a size such as 512MiB or 8GiB, got {text!r}")
    return ByteSize(int(match[1]) * _UNITS[match[2] or "B"])


def parse_duration(text: object) -> Seconds:
    """Read ``200ms``, ``30s``, ``5m`` or a plain number of seconds."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(ms|s|m|h)?", str(text).strip())
    if match is None:
        raise ValueError(f"expected a duration such as 200ms or 30s, got {text!r}")
    return Seconds(float(match[1]) * _TIMES[match[2] or "s"])


_SIZE_KEYS = {"kv_memory", "max_body"}
_DURATION_KEYS = {
    "lease",
    "heartbeat",
    "worker_timeout",
    "hung_after",
    "drain_timeout",
    "request_timeout",
}


def _units_to_numbers(node: object, path: str) -> object:
    """Replace sizes and durations written with units by plain numbers."""
    if isinstance(node, list):
        return [_units_to_numbers(item, f"{path}[{i}]") for i, item in enumerate(node)]
    if not isinstance(node, dict):
        return node
    out: dict[object, object] = {}
    for key, value in node.items():
        where = f"{path}.{key}"
        try:
            if key in _SIZE_KEYS:
                value = parse_size(value)
            elif key in _DURATION_KEYS:
                value = parse_duration(value)
        except ValueError as error:
            raise BadConfig(f"{error} - at `{where}`") from None
        out[key] = _units_to_numbers(value, where)
    return out


def load_deployment(path: str | Path) -> Deployment:
    """Read and check a deployment file.

    Raises:
        BadConfig: with file, line or key path, and what is allowed.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BadConfig(f"cannot read deployment file {path}: {error}") from error
    try:
        tree = _units_to_numbers(msgspec.yaml.decode(text), "$")
        deployment = msgspec.convert(tree, Deployment, strict=True)
    except BadConfig as error:
        raise BadConfig(f"{path}: {error.message}") from error
    except msgspec.MsgspecError as error:
        raise BadConfig(f"{path}: {error}") from error
    check_deployment(deployment, str(path))
    return deployment


def check_deployment(deployment: Deployment, source: str) -> None:
    """Check what spans several fields. Raises ``BadConfig`` naming the keys."""
    workers = deployment.workers
    if deployment.deployment_type == "split":
        for role, section in (("prefill", workers.prefill), ("decode", workers.decode)):
            if section is None or section.count < 1:
                raise BadConfig(
                    f"{source}: `workers.{role}` needs a section with count >= 1 "
                    "for `deployment_type: split`"
                )
    elif workers.mixed is None or workers.mixed.count < 1:
        raise BadConfig(
            f"{source}: `workers.mixed` needs a section with count >= 1 "
            "for `deployment_type: colocated`"
        )
    if deployment.transfer.heartbeat * 2 > deployment.transfer.lease:
        raise BadConfig(f"{source}: `transfer.heartbeat` must be at most half of `transfer.lease`")
