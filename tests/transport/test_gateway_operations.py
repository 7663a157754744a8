"""Health, metrics, overload, drain and keys of the gateway on a real socket."""

import asyncio

import pytest

from shared.errors import ErrorPayload
from tests.conftest import RunAsync
from tests.transport.gateway_rig import expected, rig
from tests.unit.gateway_model import tokenizer as tokenizer

pytestmark = pytest.mark.usefixtures("tokenizer")


def test_readiness_is_a_generation_through_both_phases(run_async: RunAsync) -> None:
    """A port that answers proves nothing: the probe must go through prefill and decode."""

    async def main() -> None:
        async with rig() as r:
            answers = await asyncio.gather(*[r.client.get("/readyz") for _ in range(5)])
            assert [a.status_code for a in answers] == [200] * 5
            (probe,) = r.router.requests
            assert probe.force_split and probe.sampling.max_tokens == 2
            assert (await r.client.get("/livez")).status_code == 200

    run_async(main())


def test_not_ready_when_the_probe_fails(run_async: RunAsync) -> None:
    async def main() -> None:
        async with rig() as r:
            r.router.refusal = ErrorPayload(code="worker_lost", message="prefill-0 is gone")
            answer = await r.client.get("/readyz")
            assert (answer.status_code, answer.json()["status"]) == (503, "prefill-0 is gone")
            assert (await r.client.get("/livez")).status_code == 200

    run_async(main())


def test_busy_is_not_unready(run_async: RunAsync) -> None:
    """A burst that fills the queue must not take the fleet out of rotation."""

    async def main() -> None:
        async with rig() as r:
            r.router.refusal = ErrorPayload(code="overloaded", message="full")
            answer = await r.client.get("/readyz")
            assert (answer.status_code, answer.json()["status"]) == (200, "busy")

    run_async(main())


def test_metrics_show_gateway_and_fleet(run_async: RunAsync) -> None:
    async def main() -> None:
        async with rig() as r:
            await r.complete(max_tokens=5)
            text = (await r.client.get("/metrics")).text
            assert "diptych_ttft_seconds_count 1.0" in text
            assert (
                'diptych_gateway_requests_total{endpoint="completions",outcome="finished"} 1.0'
                in text
            )
            assert "diptych_gateway_output_tokens_total 5.0" in text
            assert 'diptych_worker_steps_total{role="prefill",worker="prefill-0"} 7.0' in text
            assert 'diptych_router_decisions_total{reason="split"} 3.0' in text
            r.router.silent = True
            text = (await r.client.get("/metrics")).text
            assert "diptych_router_up 0.0" in text

    run_async(main())


def test_full_table_is_429_and_admits_all_or_nothing(run_async: RunAsync) -> None:
    async def main() -> None:
        async with rig(max_open=3) as r:
            r.router.hold()
            first = asyncio.create_task(r.post("completions", prompt="x", n=2))
            await r.router.until(lambda router: len(router.running) == 2)
            answer = await r.post("completions", prompt="x", n=2)
            assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
            assert len(r.router.running) == 2
            r.router.release()
            assert (await first).status_code == 200

    run_async(main())


def test_drain_finishes_what_is_open_and_refuses_new(run_async: RunAsync) -> None:
    """A rolling restart must not cost a client its answer."""

    async def main() -> None:
        async with rig() as r:
            r.router.hold(2)
            task = asyncio.create_task(r.complete(max_tokens=30))
            await r.router.until(lambda router: len(router.running) == 1)
            assert r.ready.exists()
            r.stop.set()
            while r.ready.exists():
                await r.client.get("/livez")
            answer = await r.post("completions", prompt="x")
            assert answer.status_code == 503 and "retry-after" in answer.headers
            assert (await r.client.get("/readyz")).status_code == 503
            r.router.release()
            assert (await task)["choices"][0]["text"] == expected(30)

    run_async(main())


def test_ids_do_not_tell_how_busy_other_tenants_are(run_async: RunAsync) -> None:
    """They counted all requests of the gateway, one by one."""

    async def main() -> None:
        async with rig() as r:
            answers = [await r.complete(max_tokens=2) for _ in range(3)]
            first, second, third = (int(a["id"].rsplit("-")[-1], 16) for a in answers)
            assert second - first != third - second

    run_async(main())


def test_keys_are_tenants(run_async: RunAsync) -> None:
    async def main() -> None:
        async with rig(api_keys={"k1": "red", "k2": "blue"}) as r:
            for header in ({}, {"authorization": "Bearer nope"}, {"authorization": "Basic k1"}):
                for path in ("completions", "chat/completions"):
                    answer = await r.client.post(f"/v1/{path}", json={}, headers=header)
                    assert answer.status_code == 401
                    assert answer.json()["error"]["code"] == "invalid_api_key"
                assert (await r.client.get("/v1/models", headers=header)).status_code == 401
            answer = await r.client.post(
                "/v1/completions",
                json={"prompt": "x"},
                headers={"authorization": "Bearer k2"},
            )
            assert answer.status_code == 200
            assert [request.tenant for request in r.router.requests] == ["blue"]

    run_async(main())


def test_readyz_does_not_take_first_tokens_for_progress_of_decode(
    run_async: RunAsync, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prefill samples them: they still come, the probe's own too, when decode hangs."""
    monkeypatch.setattr("services.gateway.health.PROBE_DEADLINE", 0.3)

    async def main() -> None:
        async with rig() as r:
            r.router.hold(1)
            answer = await r.client.get("/readyz")
            assert (answer.status_code, answer.json()["status"]) == (503, "no answer within 0.3 s")
            await r.idle()

    run_async(main())


def test_readyz_says_busy_only_while_decode_has_just_given_tokens(
    run_async: RunAsync, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens from before decode hung made it look alive for one more probe."""
    monkeypatch.setattr("services.gateway.health.PROBE_DEADLINE", 0.3)
    monkeypatch.setattr("services.gateway.health.CACHE_TIME", 0.0)
    monkeypatch.setattr("services.gateway.health.RECENT", 30.0)

    async def main() -> None:
        async with rig() as r:
            await r.complete(max_tokens=20)
            r.router.hold(0)
            answer = await r.client.get("/readyz")
            assert (answer.status_code, answer.json()["status"]) == (200, "busy")
            monkeypatch.setattr("services.gateway.health.RECENT", 0.2)
            assert (await r.client.get("/readyz")).status_code == 503
            await r.idle()

    run_async(main())
