"""The ``diptych`` command line."""

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
    Path, typer.Argument(metavar="[CONFIG]", help="Deployment file.", show_default=False)
]
ConfigOption = Annotated[
    Path, typer.Option("--config", "-c", help="Deployment file of the run.", show_default=False)
]


def main() -> None:
    """Run the command; a known error becomes one sentence on stderr and exit code 2."""
    try:
        app()
    except DiptychError as error:
        sys.stdout.flush()
        print(f"error: {error.message}", file=sys.stderr)
        raise SystemExit(EXIT_REFUSED) from None


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
    machine's CPU, OpenAI API on <http://127.0.0.1:8000>.

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
    name: Annotated[str, typer.Argument(help="Model to fetch.")] = "smollm2-135m-instruct",
) -> None:
    """Download a model by name into the cache, with pip's own index and proxy settings.

    An interrupted download continues at the next call.

    Example: `diptych fetch smollm2-135m-instruct`
    """
    from tools.fetch.fetch import fetch as run_fetch
    from tools.fetch.fetch import known_model

    run_fetch(known_model(name), Console(stderr=True))


@app.command()
def doctor(config: ConfigArgument = DEFAULT_CONFIG) -> None:
    """Check machine, packages, model and deployment; say what to do. Exit code 1 if unfit.

    Example: `diptych doctor configs/exact.yaml`
    """
    from tools.doctor.doctor import doctor as run_doctor

    raise typer.Exit(run_doctor(config, Console()))
