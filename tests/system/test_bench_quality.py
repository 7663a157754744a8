"""``diptych bench quality`` as its users start it, on a model of random weights."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.engine_models import CONFIGS, save_model

WORDS = 300

pytestmark = [pytest.mark.system, pytest.mark.timeout(300)]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model whose tokens are the words w0, w1, …"""
    config = CONFIGS["llama"]()
    config.max_position_embeddings, config.vocab_size = 512, WORDS
    folder = save_model(tmp_path / "model", config)
    tokenizer = {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": {"type": "Whitespace"},
        "model": {
            "type": "WordLevel",
            "vocab": {f"w{i}": i for i in range(WORDS)},
            "unk_token": "w0",
        },
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return folder


def test_a_precision_outside_its_bounds_fails_the_command(model: Path, tmp_path: Path) -> None:
    """Guards: a gate in a CI of somebody else's that is green whatever is lost.

    The best tokens of random weights lie so close together that rounding swaps them.
    """
    text = tmp_path / "text"
    text.write_text(" ".join(f"w{7 * i * i % WORDS}" for i in range(64)))
    command = [sys.executable, "-m", "tools", "bench", "quality", "--model", str(model)]
    options = ["--precision", "int8", "--kv-dtype", "bf16", "--text", str(text)]
    size = ["--window", "32", "--windows", "2", "--threads", "1", "--out", str(tmp_path / "q")]
    done = subprocess.run(
        [*command, *options, *size],
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
        cwd=tmp_path,
    )
    assert (done.returncode, done.stderr) == (1, "")
    report = json.loads((tmp_path / "q.json").read_text())
    assert [(r["precision"], r["kv_dtype"]) for r in report["rows"]] == [
        ("fp32", "fp32"),
        ("int8", "bf16"),
    ]
    assert not [breach for breach in report["breaches"] if breach.startswith("fp32,")]
    assert report["breaches"], "int8 weights lost nothing?"
    assert report["breaches"][0] in done.stdout.replace("\n", " ")
    assert report["rows"][0]["decode"]["positions"] == 62
