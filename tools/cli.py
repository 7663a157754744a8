"""The ``diptych`` command line."""

import importlib.metadata
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from shared.errors import DiptychError

CONFIGS = Path(__file__).resolve().parent.parent / "configs"
DEFAULT_CONFIG = CONFIGS / "local.yaml"
EXIT_REFUSED = 2

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    add_completion=False,
    help="Serve a language model with prefill and decode in separate processes.\n\n"
    "Start with `diptych up`, then talk to it with `diptych chat` or any OpenAI client.",
)
bench_app = typer.Typer(no_args_is_help=True, help="Measure a running deployment.")
app.add_typer(bench_app, name="bench")

ConfigArgument = Annotated[
    Path, typer.Argument(metavar="CONFIG", help="Deployment file.", show_default=False)
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
    """Fetch, check and convert the model of a deployment, as `up` does before it starts.

    Done already, it only checks. Container images run it once, before the services.

    Example: `diptych prepare configs/compose.yaml`
    """
    from shared.config import load_deployment
    from tools.doctor.preflight import convert_model, fetch_model

    deployment, console = load_deployment(config), Console(stderr=True)
    fetch_model(deployment, console)
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
    prompt reused, output.

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


@app.command()
def chat(
    config: ConfigOption = None,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    temperature: Annotated[float, typer.Option(help="0 always takes the likeliest token.")] = 0.7,
    max_tokens: Annotated[int, typer.Option(help="Longest answer.")] = 512,
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


@bench_app.command("serve")
def bench_serve(
    input_words: Annotated[int, typer.Option("--input", help="Words per prompt.")] = 400,
    output_tokens: Annotated[int, typer.Option("--output", help="Tokens per answer.")] = 64,
    concurrency: Annotated[str, typer.Option(help="Clients at a time, per level.")] = "1,8,16",
    requests: Annotated[
        int | None, typer.Option(help="Requests per level; else four per client.")
    ] = None,
    config: Annotated[
        Path | None, typer.Option("--config", "-c", help="Deployment; started if none runs.")
    ] = None,
    url: Annotated[str | None, typer.Option(help="Any OpenAI server instead.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="Where the report goes, without .json and .html.")
    ] = None,
) -> None:
    """Measure TTFT, TPOT, ITL, throughput and phases; print a table, write JSON and HTML.

    Examples:

    `diptych bench serve --input 400 --output 64 --concurrency 1,8,16`

    `diptych bench serve --config configs/colocated.yaml --out reports/colocated`

    `diptych bench serve --url http://127.0.0.1:9000 --concurrency 8`
    """
    from tools.bench import command
    from tools.bench.serve import Plan
    from tools.running import find_deployment

    plan = Plan(
        input_words=input_words,
        output_tokens=output_tokens,
        levels=command.parse_levels(concurrency),
        requests=requests,
        seed=0,
        timeout=600.0,
    )
    place, console = out or command.default_output(), Console()
    if url is not None:
        raise typer.Exit(command.bench_url(url, None, plan, console, place))
    deployment = find_deployment(config, DEFAULT_CONFIG)
    raise typer.Exit(command.bench_deployment(deployment, config, plan, console, place))


@bench_app.command("codecs")
def bench_codecs(
    model: Annotated[str, typer.Option(help="Name, GGUF file or folder.")] = (
        "smollm2-135m-instruct"
    ),
    codecs: Annotated[str, typer.Option(help="Which, with commas between.")] = (
        "none,int8,k8v4,k4v4,cachegen,sparse"
    ),
    texts: Annotated[int, typer.Option(help="Prompts cut from the text.", min=1)] = 3,
    prompt: Annotated[int, typer.Option(help="Tokens per prompt.", min=1)] = 1024,
    positions: Annotated[int, typer.Option(help="Tokens read after each.", min=1)] = 64,
    chunk: Annotated[int, typer.Option(help="Tokens encoded at a time.")] = 256,
    threads: Annotated[int, typer.Option(help="Threads of torch.", min=1)] = 1,
    text: Annotated[
        Path | None, typer.Option(help="UTF-8 file; else Python's own help texts.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Where to write JSON.")] = None,
) -> None:
    """Measure KV codecs on a real model: ratio, GB/s, top-1 agreement and KL.

    Example: `diptych bench codecs --codecs int8,cachegen --out reports/codecs.json`
    """
    from tools.bench.codecs import Plan as CodecPlan
    from tools.bench.codecs import bench_codecs as run_codecs

    plan = CodecPlan(
        model=model,
        precision="bf16",
        texts=texts,
        prompt=prompt,
        positions=positions,
        chunk=chunk,
        threads=threads,
    )
    run_codecs(plan, text, codecs, out, Console())
