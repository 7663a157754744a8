"""The router on real sockets and as a process: garbage, deaths, restarts, exit codes."""

import asyncio
import json
import os
import random
import signal
import sys
from pathlib import Path

import msgspec
import pytest
import zmq

from services.router.config import RouterConfig
from services.router.service import RouterService
from shared.clock import MonotonicClock
from shared.config import SecuritySection
from shared.errors import BadConfig, ResourceMissing
from shared.ids import new_incarnation
from shared.messages.router_worker import (
    CancelWork,
    Expect,
    NewSource,
    Prefill,
    Run,
    ToWorker,
    WorkerHello,
    WorkerRefused,
)
from shared.runtime import host_id
from tests.conftest import RunAsync
from tests.transport.harness import Context, eventually, opened, raw_dealer
from tests.transport.router_rig import CONFIG, Rig, in_process, router_process
from tests.unit.message_samples import sample
from tests.unit.router_world import make_request

PATIENT = RouterConfig(worker_timeout=60.0)
"""Silence plays no part in these tests."""


def test_a_request_streams_through_a_pair(
    run_async: RunAsync, context: Context, directory: Path
) -> None:
    async def main() -> None:
        async with in_process(context, directory, PATIENT) as (rig, service):
            prefill, decode = rig.worker("prefill-0"), rig.worker("decode-0")
            gateway = rig.gateway()
            await rig.joined(prefill, decode, gateway)
            for i in range(20):
                gateway.generate(make_request(f"r{i}", max_tokens=30))
            for i in range(20):
                ended = await gateway.end_of(f"r{i}")
                assert ended.reason == "length" and ended.num_tokens == 30
            assert all(len(output) == 30 for output in gateway.output.values())
            service.state.check()
            assert not service.state.legs.by_id

    run_async(main())


def test_67_garbage_on_both_sockets_is_counted_and_nothing_dies(
    run_async: RunAsync, context: Context, directory: Path
) -> None:
    source = random.Random(3)

    async def main() -> None:
        async with in_process(context, directory, PATIENT) as (rig, service):
            prefill, decode = rig.worker("prefill-0"), rig.worker("decode-0")
            gateway = rig.gateway()
            await rig.joined(prefill, decode, gateway)
            hello = msgspec.msgpack.encode({"type": "hello", "worker": 3, "incarnation": "x"})
            junk = [b"", b"\xc1", hello, hello[:9], *(source.randbytes(60) for _ in range(200))]
            for endpoint in (rig.gateways, rig.workers):
                intruder = raw_dealer(context, endpoint, b"intruder")
                with opened(intruder):
                    for frame in junk:
                        intruder.send(frame)
                    intruder.send_multipart([b"two", b"frames"])
                    wanted = service._rejected() + len(junk) + 1
                    await eventually(lambda wanted=wanted: service._rejected() >= wanted)
            gateway.generate(make_request("r"))
            assert (await gateway.end_of("r")).reason == "length"
            status = (await gateway.status()).status
            while status.counters.rejected_frames < 2 * len(junk) + 2:  # counted at the next tick
                status = (await gateway.status()).status
            assert status.counters.rejected_frames == 2 * len(junk) + 2
            assert len(status.workers) == 2

    run_async(main())


def test_45_a_worker_of_a_later_release_is_refused_by_both_versions(
    run_async: RunAsync, context: Context, directory: Path
) -> None:
    """Guards a worker whose hello has a role unknown here: it would say it for ever."""
    hello = msgspec.to_builtins(sample(WorkerHello, full=True))
    hello |= {"worker": "decode-0", "role": "encode"}
    hello["compatibility"]["wire_version"] = 2

    async def main() -> None:
        async with in_process(context, directory, PATIENT) as (rig, service):
            later = raw_dealer(context, rig.workers, b"decode-0#1")
            with opened(later):
                later.send(msgspec.msgpack.encode(hello))
                await eventually(lambda: bool(later.getsockopt(zmq.EVENTS) & zmq.POLLIN))
                answer = msgspec.msgpack.decode(later.recv(zmq.NOBLOCK), type=ToWorker)
            assert isinstance(answer, WorkerRefused) and answer.error.code == "incompatible_peer"
            assert "wire_version: 1 here, 2 there" in answer.error.message
            assert service._rejected() == 0

    run_async(main())


def test_1_the_end_of_a_worker_process_is_noticed_long_before_its_silence(
    run_async: RunAsync, context: Context, directory: Path
) -> None:
    async def main() -> None:
        async with in_process(context, directory, PATIENT) as (rig, _):
            stand_in = await asyncio.create_subprocess_exec(
                sys.executable, "-c", "import sys; sys.stdin.read()", stdin=asyncio.subprocess.PIPE
            )
            decode = rig.worker("decode-0", pid=stand_in.pid)
            prefill, gateway = rig.worker("prefill-0"), rig.gateway()
            await rig.joined(decode, prefill, gateway)
            decode.hold = 5
            gateway.generate(make_request("r", max_tokens=10))
            await eventually(lambda: len(gateway.output["r"]) == 5)  # type: ignore[index]
            stand_in.kill()
            await stand_in.wait()
            second = rig.worker("decode-1")
            ended = await gateway.end_of("r")
            assert ended.reason == "length" and ended.num_tokens == 10
            (expect,) = [m for m in second.received if isinstance(m, Expect)]
            assert len(expect.request.output_ids) == 5

    run_async(main())


def test_1_a_prefill_whose_connection_is_gone_is_replaced(
    run_async: RunAsync, context: Context, directory: Path
) -> None:
    """The first message that cannot be delivered moves the work."""

    async def main() -> None:
        async with in_process(context, directory, PATIENT) as (rig, service):
            prefill, decode = rig.worker("prefill-0"), rig.worker("decode-0")
            gateway = rig.gateway()
            await rig.joined(prefill, decode, gateway)
            prefill.link.close()
            backup = rig.worker("prefill-1")
            await rig.joined(backup)
            peer = prefill.identity
            await eventually(lambda: not service._workers.send(peer, None))  # type: ignore[union-attr, arg-type]
            gateway.generate(make_request("r"))
            assert (await gateway.end_of("r")).reason == "length"
            assert [m for m in backup.received if isinstance(m, Prefill)]
            assert service.state.fleet.by_peer[peer].health == "lost"

    run_async(main())


def test_a_gateway_that_left_takes_its_requests_with_it(
    run_async: RunAsync, context: Context, directory: Path
) -> None:
    async def main() -> None:
        # A loop that stands still for less is no silence, and for longer it is forgiven.
        config = RouterConfig(worker_timeout=1.5)
        async with in_process(context, directory, config) as (rig, service):
            decode, gateway = rig.worker("decode-0"), rig.gateway()
            await rig.joined(decode, gateway)
            decode.hold = 3
            gateway.generate(make_request("r", 8))
            await eventually(lambda: len(gateway.output["r"]) == 3)  # type: ignore[index]
            gateway.link.close()

            def cancelled() -> bool:
                decode.report()
                return any(isinstance(m, CancelWork) for m in decode.received)

            await eventually(cancelled)
            assert not service.state.requests.open

    run_async(main())


def test_a_killed_router_comes_back_and_streams_go_on(
    run_async: RunAsync, context: Context, directory: Path
) -> None:
    """kill -9 in the middle of a stream: every token comes once, nobody says hello by hand."""

    async def main() -> None:
        rig = Rig(context, directory)
        with opened(rig):
            async with router_process(directory) as first:
                prefill, decode = rig.worker("prefill-0"), rig.worker("decode-0")
                gateway = rig.gateway()
                await rig.joined(prefill, decode, gateway)
                decode.hold = 5
                gateway.generate(make_request("r", max_tokens=12))
                await eventually(lambda: len(gateway.output["r"]) == 5)  # type: ignore[index]
                first.send_signal(signal.SIGKILL)
                await first.wait()
            async with router_process(directory) as second:
                decode.hold = 10_000

                def over() -> bool:
                    prefill.report()
                    decode.report()
                    gateway.ping()
                    return "r" in gateway.ended

                await eventually(over)
                assert len(gateway.output["r"]) == 12  # type: ignore[index]
                assert len(set(gateway.welcomes)) == len(set(decode.welcomes)) == 2
                again = [m for m in decode.received if isinstance(m, Expect | Run | NewSource)]
                assert len(again[-1].request.output_ids) == 5  # type: ignore[union-attr]
                second.send_signal(signal.SIGTERM)
                assert await second.wait() == 0

    run_async(main(), timeout=60.0)


def test_61_sigterm_lets_a_running_stream_finish_and_leaves_nothing(
    run_async: RunAsync, context: Context, directory: Path
) -> None:
    async def main() -> None:
        rig = Rig(context, directory)
        with opened(rig):
            async with router_process(directory) as process:
                ready = json.loads((directory / "router.ready").read_text())
                assert ready["pid"] == process.pid
                decode, gateway = rig.worker("decode-0"), rig.gateway()
                await rig.joined(decode, gateway)
                decode.hold = 3
                gateway.generate(make_request("r", 8))
                await eventually(lambda: len(gateway.output["r"]) == 3)  # type: ignore[index]
                process.send_signal(signal.SIGTERM)
                while not (await gateway.status()).status.draining:
                    assert process.returncode is None
                gateway.generate(make_request("late", 8))
                error = (await gateway.end_of("late")).error
                assert error is not None and error.code == "overloaded"
                decode.release()
                assert (await gateway.end_of("r")).reason == "length"
                assert await process.wait() == 0
        assert sorted(os.listdir(directory)) == ["deployment.yaml"]

    run_async(main(), timeout=60.0)


def test_an_address_in_use_is_refused_before_anything_starts(
    run_async: RunAsync, context: Context, directory: Path
) -> None:
    async def main() -> None:
        async with router_process(directory):
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "services.router",
                "--config",
                str(directory / "deployment.yaml"),
                stderr=asyncio.subprocess.PIPE,
            )
            _, stderr = await process.communicate()
            assert process.returncode == 2
            assert stderr.decode().strip().splitlines()[-1].startswith("error: ")
            assert (directory / "router.ready").exists(), "the one that runs stays ready"

    run_async(main(), timeout=60.0)


def test_a_bad_config_is_one_sentence_and_exit_code_2(run_async: RunAsync, directory: Path) -> None:
    async def main() -> None:
        config = directory / "bad.yaml"
        config.write_text(CONFIG.format(directory=directory) + "surprise: 1\n")
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "services.router",
            "--config",
            str(config),
            stderr=asyncio.subprocess.PIPE,
        )
        _, stderr = await process.communicate()
        assert process.returncode == 2 and b"surprise" in stderr
        assert stderr.count(b"\n") == 1

    run_async(main(), timeout=60.0)


def test_an_open_tcp_port_without_keys_is_refused(
    run_async: RunAsync, context: Context, directory: Path
) -> None:
    async def main() -> None:
        service = RouterService(PATIENT, new_incarnation(), context, host_id(), MonotonicClock())
        gateways = f"ipc://{directory}/g.sock"
        with opened(service):
            with pytest.raises(BadConfig, match="keys"):
                service.bind(gateways, "tcp://0.0.0.0:0", SecuritySection())
            with pytest.raises(ResourceMissing):
                service.bind(gateways, f"ipc://{directory}/w.sock", SecuritySection())

    run_async(main())
