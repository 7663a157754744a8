"""The deployment file: everything shipped loads, everything wrong is named."""

from pathlib import Path

import pytest

from shared.config import load_deployment
from shared.errors import BadConfig
from shared.runtime import worker_ids
from shared.units import parse_address, parse_duration, parse_size
from shared.worker.settings import worker_settings

CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.yaml"))

SPLIT = """
name: local
deployment_type: split
workers:
  prefill: {count: 1}
  decode: {count: 1}
"""


def _load(tmp_path: Path, text: str) -> object:
    path = tmp_path / "deployment.yaml"
    path.write_text(text)
    return load_deployment(path)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.stem)
def test_shipped_configs_load(path: Path) -> None:
    """Guards ``make up`` and the documented modes against a typo in a shipped file."""
    deployment = load_deployment(path)
    assert deployment.name == path.stem
    assert worker_ids(deployment)


def test_shipped_precisions_are_those_the_docs_speak_of() -> None:
    """Guards: figures, and equality with transformers, that another precision is promised for."""
    local, exact = (
        load_deployment(next(p for p in CONFIGS if p.stem == name)) for name in ("local", "exact")
    )
    for deployment, precisions, dtypes in (
        (local, ("bf16", "int8"), ("bf16", "bf16")),
        (exact, ("fp32", "fp32"), ("fp32", "fp32")),
    ):
        settings = [
            worker_settings(deployment, name, (role,))
            for name, role in worker_ids(deployment)
            if role in ("prefill", "decode")
        ]
        assert [s.role for s in settings] == ["prefill", "decode"]
        assert tuple(s.precision for s in settings) == precisions
        assert tuple(s.kv_dtype for s in settings) == dtypes


def test_there_are_shipped_configs() -> None:
    """Guards the test above against passing on an empty folder."""
    assert {p.stem for p in CONFIGS} >= {"local", "colocated", "exact"}


def test_units_become_numbers(tmp_path: Path) -> None:
    """Guards sizes and durations, and that an API key that looks like one stays a key."""
    deployment = load_deployment(
        _write(
            tmp_path,
            SPLIT.replace("decode: {count: 1}", "decode: {count: 2, kv_memory: 3GiB}")
            + "transfer: {lease: 1m, heartbeat: 500ms}\n"
            + "gateway: {api_keys: {lease: alice, kv_memory: bob}, request_timeout: 90}\n",
        )
    )
    assert deployment.workers.decode is not None
    assert deployment.workers.decode.kv_memory == 3 << 30
    assert (deployment.transfer.lease, deployment.transfer.heartbeat) == (60.0, 0.5)
    assert deployment.gateway.request_timeout == 90.0
    assert deployment.gateway.api_keys == {"lease": "alice", "kv_memory": "bob"}
    names = [str(worker) for worker, _ in worker_ids(deployment)]
    assert names == ["prefill-0", "decode-0", "decode-1"]


def _write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "deployment.yaml"
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("extra", "parts"),
    [
        ("oops: 1", ["unknown field `oops`", "allowed: name,", "kv_reuse"]),
        ("store: {ram: 8GiB}", ["unknown field `store`"]),
        ("model: {pth: x}", ["unknown field `pth`", "`$.model`", "allowed: path,"]),
        ("model: x", ["Expected `object`", "`$.model`", "allowed: path,"]),
        ("model: {block_size: 0}", [">= 1", "`$.model.block_size`"]),
        ("model: {block_size: 257}", ["<= 256", "`$.model.block_size` (allowed: 1 to 256)"]),
        ("model: {max_model_len: '8192'}", ["Expected `int", "`$.model.max_model_len`"]),
        ("kv_reuse: {prefix: maybe}", ["Expected `bool`", "`$.kv_reuse.prefix`"]),
        ("kv_reuse: {semantic: true}", ["unknown field `semantic`", "allowed: prefix"]),
        ("transfer: {path: rdma}", ["'rdma'", "`$.transfer.path`", "allowed: auto, host, ipc"]),
        ("transfer: {pipeline: maybe}", ["`$.transfer.pipeline`", "allowed: true, false, auto"]),
        ("transfer: {sockets: 0}", [">= 1", "`$.transfer.sockets` (allowed: 1 to 16)"]),
        ("transfer: {sockets: 17}", ["<= 16", "`$.transfer.sockets` (allowed: 1 to 16)"]),
        ("transfer: {sockets: two}", ["Expected `int`", "(allowed: 1 to 16)"]),
        ("transfer: {notify_layers: all}", ["notify_layers`", "allowed: 1 or more, auto"]),
        ("transfer: {notify_layers: 0}", [">= 1", "notify_layers` (allowed: 1 or more, auto)"]),
        (
            "kv_reuse: {prefix: 1}",
            ["Expected `bool`", "`$.kv_reuse.prefix` (allowed: true, false)"],
        ),
        ("router: {on_no_prefill: wat}", ["`$.router.on_no_prefill`", "fail, local, wait"]),
        ("router: {max_queue: 0}", [">= 1", "`$.router.max_queue` (allowed: 1 or more)"]),
        ("router: {worker_timeout: 5 parsecs}", ["'5 parsecs'", "30s", "$.router.worker_timeout"]),
        ("router: {worker_timeout: 0s}", ["'0s'", "$.router.worker_timeout"]),
        ("router: {worker_timeout: -1}", ["-1", "$.router.worker_timeout"]),
        ("router: {worker_timeout: [1]}", ["[1]", "$.router.worker_timeout"]),
        ("gateway: {max_body: 8MB}", ["'8MB'", "512MiB", "$.gateway.max_body"]),
        ("gateway: {max_body: true}", ["True", "$.gateway.max_body"]),
        ("gateway: {http: 8000}", ["Expected `str`", "`$.gateway.http`"]),
        ("gateway: {http: localhost}", ["127.0.0.1:8000", "'localhost'", "`$.gateway.http`"]),
        ("gateway: {http: 'h:70000'}", ["'h:70000'", "`$.gateway.http`"]),
        ("gateway: {zmq: 'localhost:5555'}", ["tcp://127.0.0.1:5555", "`$.gateway.zmq`"]),
        ("endpoints: {router_workers: 'pgm://x'}", ["`$.endpoints.router_workers`"]),
        ("endpoints: {router_gateways: 'tcp://'}", ["`$.endpoints.router_gateways`"]),
        ("gateway: {api_keys: {k: 1}}", ["Expected `str`", "`$.gateway.api_keys"]),
        ("transfer: {chunk_size: 1KiB}", ["`transfer.chunk_size`", "4KiB to 8MiB"]),
        ("transfer: {path: ipc, codec: int8}", ["`transfer.codec: int8`", "host or auto"]),
        ("transfer: {path: nixl}\nsecurity: {curve: always}", ["does not encrypt"]),
        ("transfer: {codec: zip}", ["$.transfer.codec", "cachegen"]),
        ("faults: {chunks: [{kind: melt, chunk: 1}]}", ["'melt'", "allowed: corrupt, delay"]),
        ("faults: {chunks: [{kind: drop}]}", ["`chunk` or `probability`", "$.faults.chunks[0]"]),
        ("faults: {chunks: [{kind: drop, chunk: 1, delay: 3x}]}", ["3x", "chunks[0].delay"]),
        ("faults: {bytes: 3}", ["`bytes`", "allowed: seed, chunks, copies"]),
        ("faults: {copies: [{kind: stale}]}", ["`copy` or `probability`", "$.faults.copies[0]"]),
        ("faults: {copies: [{kind: corrupt, copy: 1}]}", ["'corrupt'", "allowed: delay, fail"]),
        ("endpoints: {kv: 'tcp://0.0.0.0:7400'}", ["`endpoints.advertise`"]),
        ("endpoints: {advertise: 0.0.0.0}", ["`$.endpoints.advertise`", "'0.0.0.0'"]),
        ("endpoints: {advertise: '::'}", ["`$.endpoints.advertise`", "no wildcard"]),
        ("endpoints: {advertise: 'tcp://10.0.0.2'}", ["`$.endpoints.advertise`"]),
        ("endpoints: {advertise: '10.0.0.2:7400'}", ["without scheme or port"]),
        ("endpoints: {kv: 'ipc:///x.sock'}", ["tcp://HOST:PORT", "`$.endpoints.kv`"]),
        ("endpoints: {kv: 'tcp://10.0.0.1:0'}", ["tcp://HOST:PORT", "`$.endpoints.kv`"]),
        ("transfer: {lease: 5s, heartbeat: 3s}", ["`transfer.heartbeat`", "`transfer.lease`"]),
    ],
)
def test_wrong_values_name_file_key_and_what_is_allowed(
    tmp_path: Path, extra: str, parts: list[str]
) -> None:
    """Guards the operator's first minute: one sentence that says where and what."""
    with pytest.raises(BadConfig) as caught:
        _load(tmp_path, f"{SPLIT}{extra}\n")
    for part in ["deployment.yaml", *parts]:
        assert part in caught.value.message


@pytest.mark.parametrize(
    ("device", "key", "allowed"),
    [
        ("cpu", "precision", "auto bf16 fp16 fp32 int4 int8"),
        ("cpu", "kv_dtype", "bf16 fp16 fp32 int8"),
        ("cuda:1", "precision", "auto bf16 fp16 fp32 fp8"),
        ("cuda:1", "kv_dtype", "bf16 fp16 fp32 fp8"),
    ],
)
def test_what_is_allowed_instead_is_not_refused_next(
    tmp_path: Path, device: str, key: str, allowed: str
) -> None:
    """nf4 is what people ask GPUs for; they were sent on to int8, which is for CPUs."""
    workers = f"{{mixed: {{device: '{device}', {key}: nf4}}}}"
    path = _write(tmp_path, f"name: d\ndeployment_type: colocated\nworkers: {workers}\n")
    with pytest.raises(BadConfig) as caught:
        load_deployment(path)
    assert "'nf4'" in caught.value.message
    where, _, named = caught.value.message.rstrip(")").partition(" (allowed: ")
    assert where.endswith(f"`$.workers.mixed.{key}`")
    assert sorted(named.split(", ")) == allowed.split()


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("", ["found nothing"]),
        ("- a\n- b\n", ["found list"]),
        ("just words\n", ["found str"]),
        ("name: a\n  b: c\n", ["deployment.yaml:2"]),
        ("name: [\n", ["deployment.yaml:2"]),
        ("name: a\nmodel: {path: x}\nname: b\n", ["deployment.yaml:3", "'name' appears twice"]),
        ("model:\n  path: x\n  path: y\n", ["deployment.yaml:3", "'path' appears twice"]),
        ("1: x\n", ["deployment.yaml:1", "key 1 is not text"]),
        ("a: !!python/object/apply:os.system [x]\n", ["deployment.yaml:1", "constructor"]),
        ('a: "\\x00\x01"\n', ["not YAML"]),
        ("deployment_type: split\n", ["missing required field `name`"]),
        ("name: Not Good\ndeployment_type: split\n", ["`$.name`", "[a-z0-9-]"]),
        ("name: a\ndeployment_type: dis-gpu\n", ["`$.deployment_type`", "colocated, split"]),
        ("name: a\ndeployment_type: split\n", ["`workers.prefill`", "count >= 1", "split"]),
        ("name: a\ndeployment_type: colocated\n", ["`workers.mixed`", "colocated"]),
        (
            "name: a\ndeployment_type: split\nworkers: {prefill: {}, decode: {count: 0}}\n",
            ["`workers.decode`", "count >= 1"],
        ),
        (
            "name: a\ndeployment_type: colocated\nworkers: {mixed: {precision: int7}}\n",
            ["`$.workers.mixed.precision`", "bf16, fp16, fp32, int4, int8"],
        ),
        (
            "name: a\ndeployment_type: split\n"
            "workers: {prefill: {precision: fp32}, decode: {device: cuda}}\n",
            ["fp32 in `workers.prefill`", "bf16 in `workers.decode`", "GPU", "same `kv_dtype`"],
        ),
        (
            "name: a\ndeployment_type: colocated\nworkers: {mixed: {count: 2, cores: [[0]]}}\n",
            ["`workers.mixed.cores`", "2 workers"],
        ),
        (
            "name: a\ndeployment_type: colocated\nworkers: {mixed: {device: gpu}}\n",
            ["allowed: cpu, cuda, cuda:N", "`$.workers.mixed.device`"],
        ),
        (
            "name: a\ndeployment_type: split\ntransfer: {path: ipc}\n"
            "workers: {prefill: {device: cuda}, decode: {}}\n",
            ["`transfer.path: ipc`", "both roles", "auto or host"],
        ),
        (
            "name: a\ndeployment_type: split\ntransfer: {path: nixl}\n"
            "workers: {prefill: {device: cuda}, decode: {device: cuda}}\n",
            ["`transfer.path: nixl`", "machine's memory"],
        ),
        (
            "name: a\ndeployment_type: split\ntransfer: {codec: k8v4}\n"
            "workers: {prefill: {}, decode: {device: cuda}}\n",
            ["`transfer.codec: k8v4` is for CPUs"],
        ),
        (
            "name: a\ndeployment_type: colocated\n"
            "workers: {mixed: {device: 'cuda:1', precision: int8}}\n",
            ["`precision: int8` is for CPUs", "`$.workers.mixed.device`"],
        ),
        (
            "name: a\ndeployment_type: colocated\n"
            "workers: {mixed: {device: cuda, precision: int4}}\n",
            ["`precision: int4` is for CPUs", "`$.workers.mixed.device`"],
        ),
        (
            "name: a\ndeployment_type: colocated\nworkers: {mixed: {precision: fp8}}\n",
            ["`precision: fp8` is for GPUs", "int8, int4 or bf16", "`$.workers.mixed.device`"],
        ),
        (
            "name: a\ndeployment_type: colocated\nworkers: {mixed: {kv_dtype: fp8}}\n",
            ["`kv_dtype: fp8` is for GPUs", "int8, bf16 or fp16", "`$.workers.mixed.device`"],
        ),
        (
            "name: a\ndeployment_type: split\n"
            "workers: {prefill: {device: cuda, kv_dtype: fp8}, decode: {}}\n",
            ["fp8 in `workers.prefill`", "bf16 in `workers.decode`", "nothing converts fp8"],
        ),
        (
            "name: a\ndeployment_type: colocated\n"
            "workers: {mixed: {device: cuda, kv_dtype: int8}}\n",
            ["`kv_dtype: int8` is for CPUs", "bf16, fp16 or fp32", "`$.workers.mixed.device`"],
        ),
        (  # what helps first: both alike would be refused again
            "name: a\ndeployment_type: split\n"
            "workers: {prefill: {}, decode: {device: cuda, kv_dtype: int8}}\n",
            ["`kv_dtype: int8` is for CPUs", "`$.workers.decode.device`"],
        ),
        (
            "name: a\ndeployment_type: colocated\nworkers: {mixed: {cores: [[-1]]}}\n",
            ["`workers.mixed.cores`"],
        ),
    ],
)
def test_broken_files_are_named(tmp_path: Path, text: str, parts: list[str]) -> None:
    """Guards against tracebacks and silent acceptance for files that are not a deployment."""
    with pytest.raises(BadConfig) as caught:
        _load(tmp_path, text)
    for part in ["deployment.yaml", *parts]:
        assert part in caught.value.message


@pytest.mark.parametrize(
    ("prefill", "decode", "transfer"),
    [
        ("cuda:0", "cuda:1", "{}"),
        ("cuda", "cuda", "{path: ipc, codec: auto}"),
        ("cuda:0", "cpu", "{path: host}"),
        ("cpu", "cuda:3", "{path: auto}"),
    ],
)
def test_split_workers_may_be_on_gpus(
    tmp_path: Path, prefill: str, decode: str, transfer: str
) -> None:
    """Guards a refusal that outlives its reason."""
    text = (
        f"name: a\ndeployment_type: split\ntransfer: {transfer}\n"
        f"workers: {{prefill: {{device: '{prefill}'}}, decode: {{device: '{decode}'}}}}\n"
    )
    deployment = _load(tmp_path, text)
    assert deployment.workers.prefill is not None
    assert deployment.workers.prefill.device == prefill


def test_unreadable_files(tmp_path: Path) -> None:
    """Guards missing paths, directories and binary files."""
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"\xff\xfe\xfa")
    for path in (tmp_path / "absent.yaml", tmp_path, binary):
        with pytest.raises(BadConfig, match="cannot read deployment file"):
            load_deployment(path)


def test_anchors_and_merge_keys_still_work(tmp_path: Path) -> None:
    """Guards the duplicate check against refusing YAML's own way to repeat a section."""
    text = (
        "name: a\ndeployment_type: split\nworkers:\n"
        "  prefill: &w {precision: fp32, count: 1}\n  decode: {<<: *w, count: 3}\n"
    )
    workers = load_deployment(_write(tmp_path, text)).workers
    assert workers.decode is not None
    assert (workers.decode.precision, workers.decode.count) == ("fp32", 3)


def test_parsers() -> None:
    """Guards the unit grammar, digits of other scripts included."""
    assert parse_size("1 KiB") == 1024
    assert parse_size(7) == 7
    assert parse_duration("1.5h") == 5400.0
    assert parse_duration(0.25) == 0.25
    assert parse_address("[::1]:80") == ("::1", 80)
    assert parse_address("0.0.0.0:0") == ("0.0.0.0", 0)
    for bad in ("", "KiB", "1.5GiB", "-1", "0", "\u0663", "1kib"):
        with pytest.raises(ValueError):
            parse_size(bad)
    for bad in ("", "s", "1e3", "-1s", "0", "0.0ms", "1 day"):
        with pytest.raises(ValueError):
            parse_duration(bad)
    for bad in ("", ":80", "a:", "a:b", "a:1:2", "::1:80", "a b:1", "a:-1", "http://a:1"):
        with pytest.raises(ValueError):
            parse_address(bad)
