"""The doctor finds what is wrong, and its sentence says what to do."""

import io
import json
import socket
import struct
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from shared.config import Deployment
from shared.errors import BadConfig, DiptychError, NotFound, ResourceMissing
from shared.kernels.build import KernelsUnavailable
from tools.doctor import deployment as deployment_checks
from tools.doctor import machine, preflight
from tools.doctor.deployment import check_endpoints, check_memory, check_port
from tools.doctor.doctor import examine
from tools.doctor.gguf_header import summarise
from tools.doctor.machine import check_machine, check_shared_memory
from tools.doctor.model import inspect_model

TREE = {
    "name": "t",
    "deployment_type": "split",
    "workers": {"prefill": {"kv_memory": 1 << 20}, "decode": {"kv_memory": 1 << 20, "count": 2}},
}


def make(**changes: object) -> Deployment:
    return msgspec.convert({**TREE, **changes}, Deployment)


def gguf(data: int = 64, version: int = 3) -> bytes:
    """Return a file with one F32 tensor of 16 values, two metadata pairs, ``data`` bytes."""

    def text(value: str) -> bytes:
        return struct.pack("<Q", len(value)) + value.encode()

    out = b"GGUF" + struct.pack("<IQQ", version, 1, 3)
    out += text("general.alignment") + struct.pack("<II", 4, 64)
    out += text("tokens") + struct.pack("<IIQ", 9, 8, 2) + text("a") + text("bc")
    out += text("scores") + struct.pack("<IIQ", 9, 6, 2) + struct.pack("<ff", 1, 2)
    out += text("w") + struct.pack("<IQQIQ", 2, 4, 4, 0, 0)
    out += bytes(-len(out) % 64)
    return out + bytes(data)


def test_gguf_header_gives_parameters_and_size(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf())
    summary = summarise(path)
    assert (summary.parameters, summary.size) == (16, len(gguf()))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (gguf()[:-1], "is cut off"),
        (gguf()[:40], "not a complete GGUF file"),
        (b"", "not a complete GGUF file"),
        (b"PK\3\4" + bytes(100), "does not begin with GGUF"),
        (gguf(version=9), "GGUF version 9"),
        (b"GGUF" + b"\xff" * 60, "not a complete GGUF file"),
    ],
)
def test_a_damaged_gguf_is_named(tmp_path: Path, content: bytes, words: str) -> None:
    """Guards: a truncated or wrong model file is found before a service starts."""
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    with pytest.raises(ResourceMissing, match=words):
        inspect_model(str(path))


def safetensors(folder: Path, data: int) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "tokenizer.json").write_text("{}")
    entry = {"dtype": "F32", "shape": [4, 2], "data_offsets": [0, 32]}
    header = json.dumps({"__metadata__": {"format": "pt"}, "w": entry}).encode()
    content = len(header).to_bytes(8, "little") + header + bytes(data)
    (folder / "model.safetensors").write_bytes(content)
    return folder


def test_safetensors_directory(tmp_path: Path) -> None:
    assert inspect_model(str(safetensors(tmp_path / "m", 32))).parameters == 8
    with pytest.raises(ResourceMissing, match="cut off"):
        inspect_model(str(safetensors(tmp_path / "cut", 31)))


@pytest.mark.parametrize("missing", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_directory_that_lacks_a_file_is_named(tmp_path: Path, missing: str) -> None:
    folder = safetensors(tmp_path / "m", 32)
    (folder / missing).unlink()
    with pytest.raises(NotFound, match=missing.replace("model", r"\*").replace(".", r"\.")):
        inspect_model(str(folder))


def test_no_model_names_what_is_possible() -> None:
    with pytest.raises(NotFound, match=r"safetensors directory, a \.gguf file, or one of: smollm2"):
        inspect_model("/nowhere/m.gguf")


def test_a_known_model_that_is_not_fetched_says_how(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(NotFound, match="run: diptych fetch smollm2-135m-instruct"):
        inspect_model("smollm2-135m-instruct")


def test_memory_counts_every_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards: weights in the worker's own precision, times the number of workers."""
    base = 512 << 20
    needed = 3 * (2_000_000 + (1 << 20) + base)
    monkeypatch.setattr(deployment_checks, "available_memory", lambda: needed)
    assert "2 x decode" in check_memory(make(), 1_000_000)
    monkeypatch.setattr(deployment_checks, "available_memory", lambda: needed - 1)
    with pytest.raises(ResourceMissing, match="too little memory"):
        check_memory(make(), 1_000_000)


def test_a_port_in_use_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ResourceMissing, match=f"{address} cannot be opened"):
            check_port(address)
    assert check_port(address).endswith("is free")


@pytest.mark.parametrize("address", ["8000", "127.0.0.1:", "127.0.0.1:http", "h:99999"])
def test_a_wrong_address_is_a_config_error(address: str) -> None:
    with pytest.raises(BadConfig, match="expected host:port"):
        check_port(address)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"runtime_dir": "/tmp/" + "x" * 100}, "107 are possible"),
        ({"gateway": {"zmq": "tcp://0.0.0.0:5555"}}, "diptych keys"),
        ({"endpoints": {"router_workers": "udp://1.2.3.4:5"}}, "must be tcp://"),
    ],
)
def test_bad_endpoints_are_found(changes: dict[str, object], words: str) -> None:
    with pytest.raises(DiptychError, match=words):
        check_endpoints(make(**changes))


@pytest.mark.parametrize(
    ("gateway", "words"),
    [
        ({"http": "0.0.0.0:8000"}, "can be reached from other machines"),
        ({"operators": ["ops"]}, "which no `gateway.api_keys` has"),
    ],
)
def test_what_the_gateway_would_refuse_is_found_before_the_start(
    gateway: dict[str, object], words: str
) -> None:
    with pytest.raises(BadConfig, match=words):
        preflight.require_machine(make(gateway=gateway))


def test_shared_memory_works_here() -> None:
    assert "works" in check_shared_memory()


def test_machine_lines_are_complete() -> None:
    topics = [finding.topic for finding in check_machine()]
    assert topics == ["python", "packages", "processor", "shared memory", "compiler", "kernels"]


def test_kernels_that_cannot_be_built_are_a_warning_before_the_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Serving would be slow for a reason that only a worker's log holds."""

    def unavailable() -> None:
        raise KernelsUnavailable("no C++ compiler found")

    for module in (preflight, machine):
        monkeypatch.setattr(module, "is_built", unavailable)
    console = Console(record=True, file=io.StringIO(), width=200)
    preflight.build_kernels(console)
    assert "serving is slow: no C++ compiler found" in console.export_text()
    (finding,) = [f for f in check_machine() if f.topic == "kernels"]
    assert (finding.level, "no C++ compiler found" in finding.text) == ("warn", True)


def test_fp16_on_a_cpu_is_a_warning_before_the_start() -> None:
    """It serves, ten times slower than bf16: a user would blame the machine."""

    def said(device: str, precision: str) -> str:
        console = Console(record=True, file=io.StringIO(), width=200)
        workers = {"prefill": {}, "decode": {"device": device, "precision": precision}}
        preflight.warn_of_slow_weights(make(workers=workers), console)
        return console.export_text()

    assert "`workers.decode.precision: fp16`" in said("cpu", "fp16")
    assert "bf16, int8 or auto" in said("cpu", "fp16")
    assert said("cuda", "fp16") + said("cpu", "bf16") == ""


def test_examine_reports_a_bad_key_with_its_path(tmp_path: Path) -> None:
    config = tmp_path / "x.yaml"
    config.write_text("name: x\ndeployment_type: split\nmodel: {blocksize: 3}\n")
    (finding,) = [f for f in examine(config) if f.topic == "config"]
    assert finding.level == "fail"
    assert "blocksize" in finding.text and str(config) in finding.text


def test_examine_of_a_good_deployment_has_no_failure(
    tmp_path: Path, free_port: Callable[[], int]
) -> None:
    model = safetensors(tmp_path / "m", 32)
    config = tmp_path / "x.yaml"
    config.write_text(
        f"name: x\ndeployment_type: split\nmodel: {{path: {model}}}\n"
        "workers: {prefill: {kv_memory: 1MiB}, decode: {kv_memory: 1MiB}}\n"
        f"gateway: {{http: '127.0.0.1:{free_port()}'}}\nruntime_dir: {tmp_path / 'r'}\n"
    )
    findings = examine(config)
    assert [f for f in findings if f.level == "fail"] == []
    assert {"model", "memory", "http", "endpoints"} <= {f.topic for f in findings}


@pytest.fixture
def free_port() -> Callable[[], int]:
    def find() -> int:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            return int(probe.getsockname()[1])

    return find
