"""Real worker processes, real sockets, a tiny random model; the test plays the router."""

import asyncio
import signal
import subprocess
import sys
from collections.abc import Callable, Coroutine
from functools import cache, partial
from pathlib import Path

import msgspec
import pytest
import torch
import zmq
from transformers import LlamaForCausalLM

from shared.ids import DispatchId, Incarnation, WorkerId
from shared.messages.fleet import PipelineRule
from shared.messages.router_worker import (
    CancelWork,
    Drained,
    DrainWorker,
    NewSource,
    Run,
    SequenceFailed,
    TransferLost,
)
from tests.conftest import RunAsync
from tests.transport.worker_rig import (
    BLOCK,
    LAYERS,
    ROOT,
    Rig,
    make_config,
    request,
    rig,
    running,
)
from tests.unit.engine_models import CONFIGS, save_model

PAIR = ("prefill-0", "decode-0")
LONG = tuple(3 + i * 7 % 90 for i in range(1500))

Runner = Callable[[Coroutine[object, object, None]], None]


@pytest.fixture
def run(run_async: RunAsync) -> Runner:
    return partial(run_async, timeout=110.0)


@cache
def network(model: Path) -> LlamaForCausalLM:
    """Load the stock model."""
    return LlamaForCausalLM.from_pretrained(model, dtype=torch.float32).eval()


@cache
def reference(model: Path, prompt: tuple[int, ...], count: int) -> list[int]:
    """Return transformers' greedy continuation; many tests ask for the same."""
    ids = torch.tensor([prompt])
    out = network(model).generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=count,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    return [int(token) for token in out[0, len(prompt) :]]


def prompts() -> list[tuple[int, ...]]:
    """Return prompts around block and chunk boundaries, some sharing prefixes."""
    lengths = [1, BLOCK - 1, BLOCK, BLOCK + 1, 31, 32, 33, 8 * BLOCK, 70]
    return [tuple(3 + (i * i + n // 3) % 90 for i in range(n)) for n in lengths]


def test_a_mixed_worker_equals_the_reference_in_a_busy_batch(
    run: Runner, model: Path, directory: Path
) -> None:
    async def check() -> None:
        async with rig(make_config(directory, model, split=False), "mixed-0") as router:
            work = [(router.next_dispatch(), prompt) for prompt in prompts() * 2]
            for dispatch, prompt in work:
                router.send("mixed-0", Run(dispatch=dispatch, request=request(prompt, 12)))
            for dispatch, prompt in work:
                assert await router.output(dispatch) == reference(model, prompt, 12)
            load = await router.settled("mixed-0")
            assert load.blocks_free + load.blocks_cached == load.blocks_total

    run(check())


@pytest.mark.parametrize("pipeline", [True, False, "auto"])
def test_a_pair_equals_the_reference_and_keeps_nothing(
    run: Runner, model: Path, directory: Path, pipeline: PipelineRule
) -> None:
    """Guards split = unsplit at block and chunk boundaries (37), and KV left behind (79).

    With ``auto`` hand-overs of both kinds are open at once: guards a switch between them.
    """

    async def check() -> None:
        transfer = {"pipeline": pipeline, "notify_layers": 1}
        config = make_config(directory, model, split=True, transfer=transfer)
        async with rig(config, *PAIR) as router:
            before = int(pipeline == "auto")
            if before:  # until one has arrived the path is not known, and nothing is tried
                await router.output(router.split(request(LONG[:40], 12))[1])
            work = [(router.split(request(prompt, 12)), prompt) for prompt in prompts() * 2]
            for (first, second), prompt in work:
                assert await router.output(second) == reference(model, prompt, 12)
                assert router.tokens[first] == router.tokens[second][:1]
                assert first in router.prefilled
            for worker in PAIR:
                load = await router.settled(worker)
                assert load.blocks_free + load.blocks_cached == load.blocks_total
            report = router.reports[router.hellos[WorkerId("decode-0")][0]]
            assert report.counters.transfers_ok == len(work) + before
            assert report.counters.transfers_failed == report.counters.late_messages == 0
            (pair,) = report.pairs
            assert (pair.path, pair.reason) == ("ipc", "self_test"), "one host: shared memory (42)"
            if pipeline == "auto":
                assert 0 < pair.pipelined < len(work) and pair.pipeline_reason != "configured"
            else:
                assert pair.pipelined == (len(work) if pipeline else 0)
                assert pair.pipeline_reason == "configured"

    run(check())


async def recover(router: Rig, second: DispatchId, other: str) -> None:
    """Answer a loss of KV as a router does: another prefill worker, the same decode dispatch."""
    await router.until(
        lambda: (
            second in router.ended
            or any(isinstance(m, TransferLost) and m.dispatch == second for _, m in router.messages)
        )
    )
    if second in router.ended:
        return
    first = router.next_dispatch()
    work = request(LONG, 6)
    router.send("decode-0", NewSource(dispatch=second, source=router.source(other, first)))
    router.send(other, router.prefill_message(first, work))


def test_decode_survives_prefill_being_killed_at_any_point(
    run: Runner, model: Path, directory: Path
) -> None:
    """Guards hangs, restarts of decode and wrong KV after ``kill -9`` of prefill (1, 2, 3)."""

    async def check() -> None:
        right = reference(model, LONG, 6)
        config = make_config(directory, model, split=True)
        async with rig(config, "prefill-0", "prefill-1", "decode-0") as router:
            decode = router.processes["decode-0"].pid
            for number, delay in enumerate((0.01, 0.05, 0.15)):
                victim, other = f"prefill-{number % 2}", f"prefill-{(number + 1) % 2}"
                _, second = router.split(request(LONG, 6), prefill=victim)
                await asyncio.sleep(delay)
                router.kill(victim)
                router.start(victim)
                await recover(router, second, other)
                assert await router.output(second) == right
                await router.ready(victim)
            assert router.processes["decode-0"].pid == decode
            for worker in ("prefill-0", "prefill-1", "decode-0"):
                load = await router.settled(worker)
                assert load.blocks_free + load.blocks_cached == load.blocks_total

    run(check())


def test_a_source_that_dies_before_it_answers_costs_one_transfer_only(
    run: Runner, model: Path, directory: Path
) -> None:
    """Guards waiting for ever in the handshake (5), and KV of a cancelled request (21, 29)."""

    async def check() -> None:
        config = make_config(directory, model, split=True)
        async with rig(config, "prefill-0", "prefill-1", "decode-0") as router:
            router.processes["prefill-0"].send_signal(signal.SIGSTOP)
            _, second = router.split(request(LONG, 6))
            _, other = router.split(request(LONG, 6), prefill="prefill-1")
            right = reference(model, LONG, 6)
            assert await router.output(other) == right
            await recover(router, second, "prefill-1")
            assert await router.output(second) == right
            router.processes["prefill-0"].send_signal(signal.SIGCONT)
            first, gone = router.split(request(LONG[:40], 6))
            router.send("decode-0", CancelWork(dispatch=gone))
            await router.until(lambda: first in router.prefilled)
            _, again = router.split(request(LONG[:40], 6))
            assert await router.output(again) == reference(model, LONG[:40], 6)
            for worker in ("prefill-0", "decode-0"):
                load = await router.settled(worker)
                assert load.blocks_leased == load.blocks_active == 0
            assert gone not in router.ended

    run(check())


def test_a_pair_that_does_not_fit_names_the_differing_fields(
    run: Runner, model: Path, directory: Path
) -> None:
    """Guards KV of another shape, block size or window being mapped (45), and hashes for words."""
    windowed = CONFIGS["mistral"]()
    windowed.num_hidden_layers = LAYERS
    other = save_model(directory / "windowed", windowed)
    worker = {"precision": "fp32", "kv_memory": "4MiB", "threads": 1}
    workers = {"prefill": worker, "decode": worker | {"count": 2}}

    def place(name: str, served: Path, block_size: int = BLOCK) -> Path:
        (directory / name).mkdir()
        changes = {"workers": workers, "runtime_dir": str(directory)}
        config = make_config(directory / name, served, split=True, **changes)
        tree = msgspec.yaml.decode(config.read_bytes())
        tree["model"] |= {"block_size": block_size, "max_model_len": 96}
        config.write_bytes(msgspec.yaml.encode(tree))
        return config

    unlike = {
        "decode-0": (place("decode-0", other), "; window: None here, 7 there (layer 0 and 3 more)"),
        "decode-1": (place("decode-1", model, 8), "do not fit: block_size: 4 here, 8 there"),
    }

    async def check() -> None:
        async with rig(place("prefill-0", model), "prefill-0") as router:
            for name, (config, _) in unlike.items():
                router.start(name, config)
            await router.ready(*unlike)
            pairs = {n: router.split(request(LONG[:40]), decode=n) for n in unlike}
            dispatches = {second: name for name, (_, second) in pairs.items()}
            await router.until(lambda: len(losses(router)) == len(unlike))
            for loss in losses(router):
                name = dispatches.pop(loss.dispatch)
                assert loss.error.code == "incompatible_peer"
                assert loss.error.message.endswith(unlike[name][1]), loss.error.message
                assert "layout: " not in loss.error.message
            for name, pair in pairs.items():
                router.cancel(*pair, decode=name)
        for loss in losses(router):
            assert (
                f"WARNING refused as a reader: incompatible_peer: {loss.error.message}"
                in (router.logs["prefill-0"])
            )
        lost = "WARNING request r: its KV (transfer 1) from prefill-0 is lost: incompatible_peer: "
        assert lost in router.logs["decode-0"]

    run(check())


def losses(router: Rig) -> list[TransferLost]:
    return [message for _, message in router.messages if isinstance(message, TransferLost)]


def test_a_worker_of_a_later_release_is_refused_by_both_versions(
    run: Runner, model: Path, directory: Path
) -> None:
    """Guards a hello that cannot be read to its end, answered by silence (45)."""

    async def check() -> None:
        config = make_config(directory, model, split=True)
        router = Rig(config)
        router.launches["decode-0"] = ("-m", "tests.transport.later_worker")
        async with running(router, "prefill-0", "decode-0"):
            first, second = router.split(request(LONG[:40]))
            await router.until(lambda: bool(losses(router)))
            (loss,) = losses(router)
            router.cancel(first, second)
            assert loss.dispatch == second and loss.error.code == "incompatible_peer"
            assert loss.error.message == (
                "prefill-0 and decode-0 do not fit: wire_version: 1 here, 2 there; install the "
                "same release on both sides"
            )
        assert loss.error.message in router.logs["prefill-0"]

    run(check())


def test_sigterm_finishes_streams_and_waits_for_leases(
    run: Runner, model: Path, directory: Path
) -> None:
    """Guards KV that vanishes under its reader (62), and streams cut by a scale-down (61)."""

    async def check() -> None:
        async with rig(make_config(directory, model, split=True), *PAIR) as router:
            prefill, decode = (router.processes[name] for name in PAIR)
            decode.send_signal(signal.SIGSTOP)
            first, second = router.split(request(LONG[:40], 40))
            await router.until(lambda: first in router.prefilled)
            prefill.terminate()
            peer = router.hellos[WorkerId("prefill-0")][0]
            await router.until(lambda: peer in router.reports and router.reports[peer].draining)
            refused = router.next_dispatch()
            router.send("prefill-0", router.prefill_message(refused, request(LONG[:40])))
            await router.until(lambda: refused in router.ended)
            failure = router.ended[refused]
            assert isinstance(failure, SequenceFailed) and failure.error.retryable
            assert prefill.poll() is None, "decode has not read it yet"
            decode.send_signal(signal.SIGCONT)
            await router.until(lambda: len(router.tokens.get(second, [])) > 2)
            decode.terminate()
            assert await router.output(second) == reference(model, LONG[:40], 40)
            await router.until(lambda: len(router.byes) == 2)

    run(check())


def test_a_restarted_router_finds_fresh_workers_and_a_drain_is_answered(
    run: Runner, model: Path, directory: Path
) -> None:
    async def check() -> None:
        async with rig(make_config(directory, model, split=True), *PAIR) as router:
            _, second = router.split(request(LONG[:40], 1900))
            await router.until(lambda: len(router.tokens.get(second, [])) > 2)
            await router.restart(Incarnation(72))
            await router.ready(*PAIR)
            _, again = router.split(request(LONG[:40], 12))
            assert await router.output(again) == reference(model, LONG[:40], 12)
            load = await router.settled("decode-0")
            assert load.blocks_active == 0 and second not in router.ended
            router.send("decode-0", DrainWorker())
            await router.until(lambda: any(isinstance(m, Drained) for _, m in router.messages))

    run(check())


def test_garbage_on_the_kv_socket_is_counted_and_nothing_dies(
    run: Runner, model: Path, directory: Path
) -> None:
    async def check() -> None:
        async with rig(make_config(directory, model, split=True), *PAIR) as router:
            context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
            stranger = context.socket(zmq.DEALER)
            stranger.setsockopt(zmq.ROUTING_ID, b"stranger#1")
            stranger.connect(router.hellos[WorkerId("prefill-0")][1].kv_endpoint)
            for frame in (b"", b"\xff" * 100, msgspec.msgpack.encode({"type": "open"}), b"\x80"):
                stranger.send(frame)
            peer = router.hellos[WorkerId("prefill-0")][0]
            await router.until(lambda: router.counter(peer, "rejected_frames") == 4)
            stranger.send(msgspec.msgpack.encode({"type": "open", "transfer": 5}))
            await router.until(lambda: router.counter(peer, "late_messages") == 1)
            stranger.close(linger=0)
            context.term()
            _, second = router.split(request(LONG[:40], 4))
            assert len(await router.output(second)) == 4

    run(check())


@pytest.mark.parametrize(
    ("service", "name", "change", "sentence"),
    [
        ("decode", "decode-7", {}, "`--name` may be decode-0"),
        ("decode", None, {"model": {"path": "/nowhere"}}, "/nowhere"),
        ("prefill", None, {"workers": {"prefill": {"cores": [[4096]]}}}, "4096"),
        ("prefill", None, {"workers": {"prefill": {"kv_memory": "1KiB"}}}, "kv_memory"),
    ],
)
def test_a_wrong_deployment_is_one_sentence_and_exit_code_2(
    model: Path,
    directory: Path,
    service: str,
    name: str | None,
    change: dict[str, dict[str, object]],
    sentence: str,
) -> None:
    """Guards tracebacks and half-started workers for what the operator can fix."""
    plain = {"workers": {"prefill": {"threads": 1}, "decode": {"threads": 1}}}
    plain["workers"].update(change.get("workers", {}))
    where = Path(str(change["model"]["path"])) if "model" in change else model
    config = make_config(directory, where, split=True, **plain)
    command = [sys.executable, "-m", f"services.{service}", "--config", str(config)]
    if name is not None:
        command += ["--name", name]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 2, done.stderr
    assert done.stderr.splitlines()[-1].startswith("error: ") and sentence in done.stderr
    assert "Traceback" not in done.stderr
    assert not list(directory.glob("*.ready")) and not list(directory.glob("kv-*"))
