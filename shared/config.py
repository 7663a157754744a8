"""The deployment file: one typed, frozen tree; unknown fields and bad values are refused.

Each service cuts its own small config out of this tree (``services/<name>/config.py``) and
hands its parts single values; the tree itself is not passed around.
"""

import re
from pathlib import Path
from typing import Annotated, Literal, NewType

import msgspec
import msgspec.inspect
from msgspec import Meta, Struct

from shared.device.names import DEVICE_PATTERN, device_problem, transfer_problem
from shared.errors import BadConfig
from shared.fault_rules import FaultsSection, check_faults
from shared.kv.layout import KvDtype
from shared.messages.fleet import CodecRule, PathRule, PipelineRule
from shared.precision import PrecisionRule, kv_dtype_for
from shared.yaml_file import read_mapping

Seconds = NewType("Seconds", float)
ByteSize = NewType("ByteSize", int)

_NAME_PATTERN = r"^[a-z0-9-]{1,32}$"
_PATTERNS = {DEVICE_PATTERN: "cpu, cuda, cuda:N", _NAME_PATTERN: "1 to 32 of a-z, 0-9 and -"}
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
    """One role. ``threads``/``cores`` default to an even share of the machine's cores.

    ``device``: ``cpu``, ``cuda`` or ``cuda:N``; all processes of the role share it.
    ``precision`` is that of the weights; ``kv_dtype`` that of keys and values: the same, or bf16
    under int8, int4 and ``auto`` weights, unless named.
    """

    count: NonNegative = 1
    device: Annotated[str, Meta(pattern=DEVICE_PATTERN)] = "cpu"
    precision: PrecisionRule = "bf16"
    kv_dtype: KvDtype | None = None
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
    """KV hand-over. ``pipeline``: announce layers while prefill computes the next ones; ``auto``
    where a pair's own hand-overs show that it pays. ``notify_layers``: layers per announcement;
    ``auto`` by their bytes.

    ``path``: ``ipc`` copies out of shared memory, ``host`` sends over sockets, ``auto`` takes
    ``ipc`` where a self-test proves it and ``host`` elsewhere, ``nixl`` reads by the library
    of that name where both sides have it, else as ``host``, decided once per pair. On
    ``host`` a reader has ``window`` slots for chunks of ``chunk_size`` bytes, and asks again after
    ``stall_timeout`` without one; its chunks are divided among ``sockets`` connections to each
    source. ``codec`` makes the bytes fewer there, with a loss; ``auto``
    takes one where the link is so slow that it pays.
    """

    path: PathRule = "auto"
    pipeline: PipelineRule = "auto"
    notify_layers: Positive | Literal["auto"] = "auto"
    codec: CodecRule = "none"
    chunk_size: ByteSize = ByteSize(512 << 10)
    window: Annotated[int, Meta(ge=1, le=1024)] = 32
    sockets: Annotated[int, Meta(ge=1, le=16)] = 1
    stall_timeout: Seconds = Seconds(2.0)
    lease: Seconds = Seconds(30.0)
    heartbeat: Seconds = Seconds(5.0)


class ReuseSection(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """KV reuse inside a worker."""

    prefix: bool = True


class RouterSection(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Admission and placement.

    A prompt with fewer than ``split_threshold`` uncached tokens is not split.
    ``spill_tokens``: with more prompt tokens than this waiting for a prefill worker, a decode
    worker with less to do computes the prompt itself; null never. ``on_no_prefill``: what to do
    when no prefill worker is ready.
    """

    split_threshold: NonNegative = 64
    max_queue: Positive = 256
    max_queued_tokens: Positive = 262_144
    spill_tokens: Positive | None = 4096
    on_no_prefill: Literal["local", "wait", "fail"] = "local"
    max_retries: NonNegative = 8
    worker_timeout: Seconds = Seconds(5.0)
    hung_after: Seconds = Seconds(30.0)
    drain_timeout: Seconds = Seconds(30.0)
    no_worker_timeout: Seconds = Seconds(30.0)


class GatewaySection(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Front door. ``api_keys``: key -> tenant; absent means one local tenant, no key asked.

    Keys of the tenants in ``operators`` may ask how the fleet is and give it orders; without
    ``api_keys`` everybody may who reaches the SDK's endpoint.

    Without keys ``http`` must be a loopback address, unless ``allow_anonymous`` says that
    something else keeps strangers out, such as a container's port published to loopback only.
    """

    http: str = "127.0.0.1:8000"
    zmq: str | None = None
    api_keys: dict[str, str] | None = None
    operators: tuple[str, ...] = ()
    allow_anonymous: bool = False
    max_body: ByteSize = ByteSize(8 << 20)
    max_open: Positive = 1024
    request_timeout: Seconds = Seconds(600.0)


class EndpointsSection(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Control endpoints; absent ones are ipc sockets in ``runtime_dir``.

    ``kv: tcp://HOST:PORT`` lets workers of other hosts reach these: worker number i of the
    deployment binds PORT + 2i for control and PORT + 2i + 1 for KV bytes. ``advertise`` is
    the host name or address that others reach this host by, needed where HOST is a wildcard.
    """

    router_gateways: str | None = None
    router_workers: str | None = None
    kv: str | None = None
    advertise: str | None = None


class SecuritySection(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``keys``: directory made by ``diptych keys``; needed for every non-loopback TCP endpoint."""

    curve: Literal["auto", "always"] = "auto"
    keys: str | None = None


class Deployment(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A whole deployment as written in ``configs/*.yaml``."""

    name: Annotated[str, Meta(pattern=_NAME_PATTERN)]
    deployment_type: DeploymentType
    model: ModelSection = ModelSection()
    workers: WorkersSection = WorkersSection()
    transfer: TransferSection = TransferSection()
    kv_reuse: ReuseSection = ReuseSection()
    router: RouterSection = RouterSection()
    gateway: GatewaySection = GatewaySection()
    endpoints: EndpointsSection = EndpointsSection()
    security: SecuritySection = SecuritySection()
    faults: FaultsSection | None = None
    runtime_dir: str | None = None


_UNITS = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_TIMES = {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}


def parse_size(text: object) -> ByteSize:
    """Read ``512MiB``, ``8GiB`` or a plain number of bytes; more than zero."""
    match = re.fullmatch(r"(\d+)\s*(B|KiB|MiB|GiB|TiB)?", str(text).strip(), re.ASCII)
    if match is None or int(match[1]) == 0:
        raise ValueError(f"expected a size such as 512MiB or 8GiB, got {text!r}")
    return ByteSize(int(match[1]) * _UNITS[match[2] or "B"])


def parse_duration(text: object) -> Seconds:
    """Read ``200ms``, ``30s``, ``5m`` or a plain number of seconds; more than zero."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(ms|s|m|h)?", str(text).strip(), re.ASCII)
    if match is None or float(match[1]) == 0:
        raise ValueError(f"expected a duration such as 200ms or 30s, got {text!r}")
    return Seconds(float(match[1]) * _TIMES[match[2] or "s"])


def parse_address(text: str) -> tuple[str, int]:
    """Read ``host:port`` or ``[ipv6]:port``; port 0 lets the system choose."""
    match = re.fullmatch(r"(?:\[([0-9A-Fa-f:.]+)\]|([^\s:/\[\]]+)):(\d{1,5})", text, re.ASCII)
    if match is None or int(match[3]) > 65535:
        raise ValueError(f"expected host:port such as 127.0.0.1:8000, got {text!r}")
    return match[1] or match[2], int(match[3])


_SIZE_KEYS = {"kv_memory", "max_body", "chunk_size"}
_DURATION_KEYS = {
    "lease",
    "heartbeat",
    "stall_timeout",
    "delay",
    "worker_timeout",
    "hung_after",
    "drain_timeout",
    "no_worker_timeout",
    "request_timeout",
}
_FREE_KEYS = {"api_keys"}


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
        out[key] = value if key in _FREE_KEYS else _units_to_numbers(value, where)
    return out


def load_deployment(path: str | Path) -> Deployment:
    """Read and check a deployment file.

    Raises:
        BadConfig: with file, line or key path, and what is allowed.
    """
    mapping = read_mapping(Path(path))
    try:
        tree = _units_to_numbers(mapping, "$")
        deployment = msgspec.convert(tree, Deployment, strict=True)
    except BadConfig as error:
        raise BadConfig(f"{path}: {error.message}") from error
    except msgspec.ValidationError as error:
        raise BadConfig(f"{path}: {error}{_allowed(str(error))}") from error
    check_deployment(deployment, str(path))
    return deployment


def _allowed(message: str) -> str:
    """Say what is allowed at the key path that ends a msgspec message."""
    node: msgspec.inspect.Type = msgspec.inspect.type_info(Deployment)
    match = re.search(r"at `\$([^`]*)`$", message)
    for key in re.findall(r"[^.\[\]]+", match[1]) if match else ():
        if key.isdigit():
            continue  # the number of a list's item, which has the list's node
        inner = _fields(node).get(key)
        if inner is None:
            return ""
        node = inner
    patterns = [words for pattern, words in _PATTERNS.items() if f"'{pattern}'" in message]
    allowed = patterns or _literals(node) or list(_fields(node))
    return f" (allowed: {', '.join(allowed)})" if allowed else ""


def _arms(node: msgspec.inspect.Type) -> tuple[msgspec.inspect.Type, ...]:
    if isinstance(node, msgspec.inspect.VarTupleType):
        return _arms(node.item_type)
    return node.types if isinstance(node, msgspec.inspect.UnionType) else (node,)


def _fields(node: msgspec.inspect.Type) -> dict[str, msgspec.inspect.Type]:
    structs = [arm for arm in _arms(node) if isinstance(arm, msgspec.inspect.StructType)]
    return {field.name: field.type for arm in structs for field in arm.fields}


def _literals(node: msgspec.inspect.Type) -> list[str]:
    literals = [arm for arm in _arms(node) if isinstance(arm, msgspec.inspect.LiteralType)]
    words = [str(value) for arm in literals for value in arm.values]
    if words and any(isinstance(arm, msgspec.inspect.BoolType) for arm in _arms(node)):
        words = ["true", "false", *words]
    if words and any(isinstance(arm, msgspec.inspect.IntType) for arm in _arms(node)):
        words = ["a number", *words]
    return words


def check_deployment(deployment: Deployment, source: str) -> None:
    """Check what types cannot say. Raises ``BadConfig`` naming the keys."""
    _check_roles(deployment, source)
    if deployment.transfer.heartbeat * 2 > deployment.transfer.lease:
        raise BadConfig(f"{source}: `transfer.heartbeat` must be at most half of `transfer.lease`")
    _check_transfer(deployment, source)
    try:
        parse_address(deployment.gateway.http)
    except ValueError as error:
        raise BadConfig(f"{source}: {error} - at `$.gateway.http`") from None
    for key, endpoint in (
        ("gateway.zmq", deployment.gateway.zmq),
        ("endpoints.router_gateways", deployment.endpoints.router_gateways),
        ("endpoints.router_workers", deployment.endpoints.router_workers),
    ):
        if endpoint is not None and not re.match(r"(ipc|tcp)://.", endpoint):
            raise BadConfig(
                f"{source}: expected an endpoint such as tcp://127.0.0.1:5555 or "
                f"ipc:///run/x.sock, got {endpoint!r} - at `$.{key}`"
            )


_MAX_WORKERS = 256
_WILDCARDS = ("0.0.0.0", "::", "*")
_CHUNK_SIZES = (4 << 10, 8 << 20)


def _check_transfer(deployment: Deployment, source: str) -> None:
    size, (least, most) = deployment.transfer.chunk_size, _CHUNK_SIZES
    if not least <= size <= most:
        raise BadConfig(f"{source}: `transfer.chunk_size` must be 4KiB to 8MiB, got {size} bytes")
    if deployment.transfer.path == "ipc" and deployment.transfer.codec not in ("none", "auto"):
        raise BadConfig(
            f"{source}: `transfer.codec: {deployment.transfer.codec}` needs `transfer.path` "
            "host or auto: over shared memory nothing is encoded"
        )
    if deployment.transfer.path == "nixl" and deployment.security.curve == "always":
        raise BadConfig(
            f"{source}: `transfer.path: nixl` does not encrypt, and `security.curve: always` "
            "asks for it"
        )
    check_faults(deployment.faults or FaultsSection(), source)
    endpoint = deployment.endpoints.kv
    if endpoint is None:
        return
    try:
        host, port = parse_address(endpoint.removeprefix("tcp://"))
    except ValueError:
        host, port = "", 0
    if not endpoint.startswith("tcp://") or not 0 < port < 65536 - 2 * _MAX_WORKERS:
        raise BadConfig(
            f"{source}: expected tcp://HOST:PORT with a port of 1 to {65535 - 2 * _MAX_WORKERS}, "
            f"got {endpoint!r} - at `$.endpoints.kv`"
        )
    if host in _WILDCARDS and deployment.endpoints.advertise is None:
        raise BadConfig(
            f"{source}: `endpoints.kv` listens on every address; `endpoints.advertise` must say "
            "by which host name or address other hosts reach this one"
        )


def _check_roles(deployment: Deployment, source: str) -> None:
    split = deployment.deployment_type == "split"
    prefill, decode = deployment.workers.prefill, deployment.workers.decode
    for role in ("prefill", "decode", "mixed"):
        section: WorkerSection | None = getattr(deployment.workers, role)
        if (role == "mixed") is not split and (section is None or section.count < 1):
            raise BadConfig(
                f"{source}: `workers.{role}` needs a section with count >= 1 "
                f"for `deployment_type: {deployment.deployment_type}`"
            )
        if section is None:
            continue
        problem = device_problem(section.device, section.precision, section.kv_dtype)
        if problem is not None:
            raise BadConfig(f"{source}: {problem} - at `$.workers.{role}.device`")
        if section.cores is not None:
            lists = section.cores
            if len(lists) != section.count or not all(c and min(c) >= 0 for c in lists):
                raise BadConfig(
                    f"{source}: `workers.{role}.cores` needs one list of core numbers for each "
                    f"of the {section.count} workers"
                )
    if split and prefill and decode:
        theirs, ours = (kv_dtype_for(w.precision, w.kv_dtype) for w in (prefill, decode))
        if theirs != ours and decode.device != "cpu":
            raise BadConfig(
                f"{source}: keys and values are {theirs} in `workers.prefill` and {ours} in "
                "`workers.decode`, and a GPU converts none: give both the same `kv_dtype`"
            )
        cuda = (prefill.device != "cpu", decode.device != "cpu")
        transfer = transfer_problem(deployment.transfer.path, deployment.transfer.codec, cuda=cuda)
        if transfer is not None:
            raise BadConfig(f"{source}: {transfer}")
