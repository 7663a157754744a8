"""The shipped compose.yaml on a real engine: answers, restarts under load, replicas, no rests.

Run by ``make compose-test``; skipped where no container engine is running.
"""

import re
import shutil
import socket
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from threading import Event

import pytest
from openai import OpenAI

from tests.compose.engine import REPO, Project, find_compose

pytestmark = [pytest.mark.compose, pytest.mark.timeout(1800)]

MODEL = "smollm2-135m-instruct"
PROMPTS = [
    f"Story number {i}. Once upon a time there was a lighthouse keeper who counted ships, and "
    f"on day {i} he counted"
    for i in range(4)
]
TOKENS = 128
READY = 300.0


@pytest.fixture(scope="module")
def project() -> Iterator[Project]:
    command = find_compose()
    if command is None:
        pytest.skip("no container engine is running here: `docker compose ls` fails")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    project = Project(command, port)
    try:
        project.run("build", "anchor", timeout=1500)
        project.run("up", "-d", "--wait", timeout=900)
        yield project
    finally:
        project.run("down", "-v", "--timeout", "20", check=False)


@pytest.fixture
def client(project: Project) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{project.url}/v1", api_key="none", timeout=240, max_retries=0) as made:
        yield made


@pytest.fixture(scope="module")
def expected(project: Project) -> list[str]:
    """What ``under_load`` returns when nothing is disturbed."""
    with OpenAI(base_url=f"{project.url}/v1", api_key="none", timeout=240) as client:
        answers = [ask(client, prompt) for prompt in PROMPTS]
        return answers + answers[:2]


def ask(client: OpenAI, prompt: str, started: Event | None = None) -> str:
    """Stream one greedy answer; ``started`` is set once it is under way."""
    text, count, reason = "", 0, None
    stream = client.completions.create(
        model=MODEL,
        prompt=prompt,
        max_tokens=TOKENS,
        temperature=0,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    for chunk in stream:
        if chunk.choices:
            text += chunk.choices[0].text
            reason = chunk.choices[0].finish_reason or reason
            count += 1
            if started is not None and count == 8:
                started.set()
    assert reason == "length", f"ended by {reason} after {text!r}"
    return text


def under_load(client: OpenAI, disturb: Callable[[], object]) -> list[str]:
    """Stream all prompts; disturb while all are under way and two more arrive.

    Returns the answers in the order of the prompts, then those of the two late ones.
    """
    started = [Event() for _ in PROMPTS]
    with ThreadPoolExecutor(len(PROMPTS) + 3) as pool:
        streams: list[Future[str]] = [
            pool.submit(ask, client, prompt, event)
            for prompt, event in zip(PROMPTS, started, strict=True)
        ]
        for event in started:
            assert event.wait(120), "a stream never began"
        disturbance = pool.submit(disturb)
        streams += [pool.submit(ask, client, prompt) for prompt in PROMPTS[:2]]
        answers = [stream.result(300) for stream in streams]
        disturbance.result(300)
        return answers


def metrics(project: Project, pattern: str) -> dict[str, float]:
    with urllib.request.urlopen(f"{project.url}/metrics", timeout=30) as answer:
        text = answer.read().decode()
    return {m[1]: float(m[2]) for m in re.finditer(rf"^({pattern}\S*) (\S+)$", text, re.MULTILINE)}


def workers(project: Project) -> set[str]:
    """Return the names of workers that are ready."""
    found = metrics(project, "diptych_worker_ready")
    return {re.search(r'worker="([^"]+)"', k)[1] for k, v in found.items() if v}  # type: ignore[index]


def restarted(project: Project, name: str, before: str) -> bool:
    """Return whether a service is there again, as another process."""
    script = f"cat /run/diptych/{name}.ready || true"
    return project.inside("decode", "sh", "-c", script) not in ("", before)


def wait_for(condition: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + READY
    while not condition():
        assert time.monotonic() < end, f"not within {READY} s: {what}"
        time.sleep(0.5)


def all_healthy(project: Project) -> bool:
    return all(
        state == "running healthy"
        for name, state in project.states().items()
        if not re.search("keys|models", name)
    )


def copy_of_the_project(folder: Path) -> Path:
    """Return a copy of what `compose watch` looks at, to be edited."""
    ignored = shutil.ignore_patterns(".git", ".venv", ".*cache", "__pycache__", "reports")
    return Path(shutil.copytree(REPO, folder / "tree", ignore=ignored))


def ready_file(project: Project, name: str) -> str:
    """Return pid and incarnation of a service as it wrote them."""
    return project.inside("decode", "cat", f"/run/diptych/{name}.ready")


def test_every_service_is_healthy_and_not_root(project: Project) -> None:
    wait_for(lambda: all_healthy(project), "healthy")
    assert workers(project) == {"prefill-0", "decode-0"}
    for service in ("router", "prefill", "decode", "gateway"):
        assert project.inside(service, "id", "-u").strip() == "10001"


def test_prompts_are_split_over_shared_memory(project: Project, expected: list[str]) -> None:
    """Both containers do their phase, and the doctor can open the other one's KV."""
    assert len(set(expected)) == len(PROMPTS)
    reasons = metrics(project, "diptych_router_decisions_total")
    assert sum(v for k, v in reasons.items() if 'reason="split"' in k) >= len(PROMPTS), reasons
    doctor = project.run(
        "exec", "-T", "decode", "diptych", "doctor", "configs/compose.yaml", check=False
    )
    words = " ".join(doctor.split())
    assert "the memory of prefill-0, decode-0 can be opened" in words, doctor


def test_keys_belong_to_the_service_user_alone(project: Project) -> None:
    listing = project.inside(
        "router", "find", "/etc/diptych/keys", "-type", "f", "-printf", "%m:%U "
    )
    assert listing.split() == ["600:10001"] * 4


def test_a_container_with_a_wrong_key_is_refused_and_named(project: Project) -> None:
    """Guards a fleet open to whoever reaches its sockets; the router's log tells the key (67)."""
    script = (
        "diptych keys /tmp/keys && cp /etc/diptych/keys/server.public /tmp/keys/ "
        "&& sed s:/etc/diptych/keys:/tmp/keys: configs/compose.yaml > /tmp/stranger.yaml "
        "&& cat /tmp/keys/clients/fleet.public "
        "&& exec timeout -k 5 25 python -m services.decode --config /tmp/stranger.yaml --name auto"
    )
    with ThreadPoolExecutor(1) as pool:
        stranger = pool.submit(
            *(project.run, "run", "--rm", "-T", "--no-deps", "--entrypoint", "sh"),
            *("decode", "-c", script),
            check=False,
        )
        refused = re.compile(r"refused a connection: its key (\S{40}) ")
        wait_for(lambda: bool(refused.search(project.run("logs", "router"))), "named in the log")
        assert workers(project) == {"prefill-0", "decode-0"}
        said = stranger.result(120)
    named = refused.search(project.run("logs", "router"))
    assert named is not None and named[1] in said
    assert workers(project) == {"prefill-0", "decode-0"}


@pytest.mark.parametrize("service", ["decode", "prefill", "router"])
def test_a_restart_under_load_loses_nothing(
    project: Project, client: OpenAI, expected: list[str], service: str
) -> None:
    assert under_load(client, lambda: project.run("restart", service)) == expected
    wait_for(lambda: workers(project) == {"prefill-0", "decode-0"}, f"{service} back")


@pytest.mark.parametrize("service", ["decode", "prefill"])
def test_kill_9_inside_a_container_loses_nothing(
    project: Project, client: OpenAI, expected: list[str], service: str
) -> None:
    """The engine starts it again by itself, under its old name."""
    kill = f"import json, os; os.kill(json.load(open('/run/diptych/{service}-0.ready'))['pid'], 9)"
    before = ready_file(project, f"{service}-0")
    assert under_load(client, lambda: project.inside(service, "python", "-c", kill)) == expected
    wait_for(lambda: workers(project) == {"prefill-0", "decode-0"}, f"{service} back")
    assert ready_file(project, f"{service}-0") != before


def test_decode_scales_to_two_and_back(
    project: Project, client: OpenAI, expected: list[str]
) -> None:
    project.run("up", "-d", "--wait", "--no-recreate", "--scale", "decode=2", timeout=900)
    wait_for(
        lambda: workers(project) == {"prefill-0", "decode-0", "decode-1"}, "two decode workers"
    )
    assert under_load(client, lambda: None) == expected
    done = under_load(
        client, lambda: project.run("up", "-d", "--no-recreate", "--scale", "decode=1")
    )
    assert done == expected
    wait_for(lambda: len(workers(project)) == 2, "one decode worker")


def test_an_anchor_that_is_killed_comes_back_with_all_that_joined_it(
    project: Project, client: OpenAI, expected: list[str]
) -> None:
    """The kernel ends every process of its namespace; `up` starts what the engine gave up on."""
    before = ready_file(project, "decode-0")
    project.run("kill", "-s", "KILL", "anchor")
    project.run("up", "-d", "--wait", timeout=600)
    wait_for(lambda: workers(project) == {"prefill-0", "decode-0"}, "workers back")
    assert ready_file(project, "decode-0") != before
    assert ask(client, PROMPTS[0]) == expected[0]


def test_watch_restarts_the_service_that_is_edited_and_no_other(
    project: Project, client: OpenAI, expected: list[str], tmp_path: Path
) -> None:
    """While developing, an edit must not cost the loaded models of the workers."""
    names = ("router", "prefill-0", "decode-0")
    before = {name: ready_file(project, name) for name in names}
    tree = copy_of_the_project(tmp_path)
    with project.watching(tree, "router", "prefill", "decode"):
        (tree / "services/router/__init__.py").write_text('"""Edited."""\n', encoding="utf-8")
        wait_for(lambda: restarted(project, "router", before["router"]), "router restarted")
        wait_for(lambda: workers(project) == {"prefill-0", "decode-0"}, "workers are welcome")
    edited = project.inside("router", "cat", "/app/services/router/__init__.py")
    assert "Edited" in edited
    assert all(ready_file(project, name) == before[name] for name in names[1:])
    assert ask(client, PROMPTS[0]) == expected[0]


def test_a_second_up_changes_nothing(project: Project, client: OpenAI, expected: list[str]) -> None:
    """Keys stay, the model is there, nothing is started anew."""
    before = ready_file(project, "prefill-0")
    project.run("up", "-d", "--wait", timeout=600)
    assert ask(client, PROMPTS[0]) == expected[0]
    assert ready_file(project, "prefill-0") == before


def test_down_leaves_nothing(project: Project) -> None:
    project.run("down", "-v")
    assert project.states() == {}
    assert project.left() == []
