"""Real worker processes whose KV differs in dtype: decode converts what it takes in."""

from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path

import pytest

from shared.kv.layout import KvDtype
from tests.conftest import RunAsync
from tests.transport.kv_reference import TwoEngines
from tests.transport.test_worker_processes import PAIR
from tests.transport.worker_rig import BLOCK, make_config, request, rig

Runner = Callable[[Coroutine[object, object, None]], None]
TRANSFER = {"notify_layers": 1, "lease": "4s", "heartbeat": "500ms", "chunk_size": "4KiB"}
CORRUPT = {"chunks": [{"kind": "corrupt", "probability": 0.2}]}


@pytest.fixture
def run(run_async: RunAsync) -> Runner:
    return partial(run_async, timeout=110.0)


def prompts() -> list[tuple[int, ...]]:
    """Around block boundaries; none begins as another, so that no prefix is shared."""
    lengths = (1, BLOCK, BLOCK + 1, 31, 8 * BLOCK, 70)
    return [tuple(3 + (i * i + 11 * n) % 90 for i in range(n)) for n in lengths]


@pytest.mark.parametrize(
    ("path", "dtypes", "faults"),
    [
        ("ipc", ("bf16", "int8"), None),
        ("host", ("bf16", "int8"), CORRUPT),
        ("host", ("int8", "fp16"), None),
    ],
)
def test_a_pair_that_converts_equals_converting_in_one_process(
    run: Runner,
    model: Path,
    directory: Path,
    path: str,
    dtypes: tuple[KvDtype, KvDtype],
    faults: dict[str, object] | None,
) -> None:
    """Guards KV read in the source's dtype or sizes, and unverified KV that was converted (41).

    Asked twice: guards blocks of another dtype in the prefix cache of either side.
    """
    worker = {"precision": "fp32", "kv_memory": "4MiB", "threads": 1, "max_batch_tokens": 128}
    workers = {
        role: worker | {"kv_dtype": dtype}
        for role, dtype in zip(("prefill", "decode"), dtypes, strict=True)
    }
    changes: dict[str, object] = {"workers": workers, "transfer": TRANSFER | {"path": path}}
    if faults is not None:
        changes["faults"] = faults
    engines = TwoEngines(model, dtypes, BLOCK, 256)
    expected = [engines.tokens(prompt, 12) for prompt in prompts()]
    engines.close()

    async def check() -> None:
        async with rig(make_config(directory, model, split=True, **changes), *PAIR) as router:
            for prompt, tokens in [*zip(prompts(), expected, strict=True)] * 2:
                _, second = router.split(request(prompt, 12))
                assert await router.output(second) == tokens

    run(check())
