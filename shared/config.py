"""The deployment file: one typed, frozen tree; unknown fields and bad values are refused.

Each service cuts its own small config out of this tree (``services/<name>/config.py``) and
hands its parts single values; the tree itself is not passed around.
"""

import re
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import msgspec.inspect
from msgspec import Meta, Struct

from shared.device.names import DEVICE_PATTERN, device_problem, transfer_problem
from shared.errors import BadConfig
from shared.fault_rules import FaultsSection, check_faults
from shared.kv.layout import KvDtype
from shared.messages.fleet import CodecRule, PathRule, PipelineRule
from shared.precision import PrecisionRule, kv_dtype_for
from shared.units import ByteSize, Seconds, parse_address, units_to_numbers
from shared.yaml_file import read_mapping

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
    ``borrow_cores``: steps also take cores of this node's workers that have nothing to do;
    ``threads`` named are never exceeded. ``precision`` is that of the weights; ``kv_dtype`` that
    of keys and values: the same, or bf16 under int8, int4, fp8 and ``auto`` weights, unless named.
    """

    count: NonNegative = 1
    device: Annotated[str, Meta(pattern=DEVICE_PATTERN)] = "cpu"
    precision: PrecisionRule = "bf16"
    kv_dtype: KvDtype | None = None
    threads: Positive | None = None
    cores: tuple[tuple[int, ...], ...] | None = None
    borrow_cores: bool = True
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


def load_deployment(path: str | Path) -> Deployment:
    """Read and check a deployment file.

    Raises:
        BadConfig: with file, line or key path, and what is allowed.
    """
    tree: object = read_mapping(Path(path))
    try:
        tree = units_to_numbers(tree, "$")
        deployment = msgspec.convert(tree, Deployment, strict=True)
    except BadConfig as error:
        raise BadConfig(f"{path}: {error.message}") from error
    except msgspec.ValidationError as error:
        raise BadConfig(f"{path}: {error}{_allowed(str(error), tree)}") from error
    check_deployment(deployment, str(path))
    return deployment


def _allowed(message: str, tree: object) -> str:
    """Say what is allowed at the key path that ends a msgspec message about ``tree``."""
    node: msgspec.inspect.Type = msgspec.inspect.type_info(Deployment)
    match = re.search(r"at `\$([^`]*)`$", message)
    keys = re.findall(r"[^.\[\]]+", match[1]) if match else []
    for key in keys:
        if key.isdigit():
            continue  # the number of a list's item, which has the list's node
        inner = _fields(node).get(key)
        if inner is None:
            return ""
        node = inner
    patterns = [words for pattern, words in _PATTERNS.items() if f"'{pattern}'" in message]
    allowed = (
        patterns or _usable(_literals(node), keys, tree) or list(_fields(node)) or _range(node)
    )
    return f" (allowed: {', '.join(allowed)})" if allowed else ""


def _usable(values: list[str], keys: list[str], tree: object) -> list[str]:
    """Leave out what the device of the worker section around ``keys`` would be refused next."""
    section = tree
    for key in keys[:-1]:
        section = section.get(key) if isinstance(section, dict) else None
    device = section.get("device", "cpu") if isinstance(section, dict) else "cpu"
    if keys[-1:] == ["precision"]:
        return [value for value in values if device_problem(device, value, None) is None]
    if keys[-1:] == ["kv_dtype"]:
        return [value for value in values if device_problem(device, "", value) is None]
    return values


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
    if any(isinstance(arm, msgspec.inspect.BoolType) for arm in _arms(node)):
        words = ["true", "false", *words]
    return [*_range(node), *words] if words else []


def _range(node: msgspec.inspect.Type) -> list[str]:
    """Return the bounds of a number in words."""
    for arm in _arms(node):
        if isinstance(arm, msgspec.inspect.IntType | msgspec.inspect.FloatType):
            if arm.ge is not None and arm.le is not None:
                return [f"{arm.ge} to {arm.le}"]
            if arm.ge is not None:
                return [f"{arm.ge} or more"]
    return []


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
    host = deployment.endpoints.advertise
    if host is not None and (host in _WILDCARDS or not host or _has_more(host)):
        raise BadConfig(
            f"{source}: expected the name or address of this machine, without scheme or port and "
            f"no wildcard, got {host!r} - at `$.endpoints.advertise`"
        )
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


def _has_more(host: str) -> bool:
    return any(c in host for c in "/[] ") or host.count(":") == 1


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
        if theirs != ours and (decode.device != "cpu" or theirs == "fp8"):
            nothing = "a GPU converts none" if decode.device != "cpu" else "nothing converts fp8"
            raise BadConfig(
                f"{source}: keys and values are {theirs} in `workers.prefill` and {ours} in "
                f"`workers.decode`, and {nothing}: give both the same `kv_dtype`"
            )
        cuda = (prefill.device != "cpu", decode.device != "cpu")
        transfer = transfer_problem(deployment.transfer.path, deployment.transfer.codec, cuda=cuda)
        if transfer is not None:
            raise BadConfig(f"{source}: {transfer}")
