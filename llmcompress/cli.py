"""The command line: a thin skin on the Python API. Heavy libraries are imported only when a command runs."""

from __future__ import annotations

import dataclasses
import os
import signal
import sys

import click

from llmcompress import __version__, methods
from llmcompress.errors import CompressError
from llmcompress.sparsity import ACCEPTED

DEFAULT_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"


class Guarded(click.Group):
    """Turns our errors into one line on stderr and their exit code."""

    def invoke(self, ctx: click.Context):
        # A plain `kill` unwinds the stack like Ctrl-C does, so that half-written folders are removed.
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
        try:
            return super().invoke(ctx)
        except CompressError as error:
            click.echo(f"Error: {error}", err=True)
            ctx.exit(error.exit_code)
        except KeyboardInterrupt:
            click.echo("Interrupted.", err=True)
            ctx.exit(130)


@click.group(cls=Guarded, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__, prog_name="llmcompress")
def main() -> None:
    """Compress Hugging Face decoder models and get a checkpoint that loads everywhere.

    Start with `llmcompress quickstart`, then `llmcompress prune --model DIR --method fista --sparsity 2:4`.
    """


def method_options(command):
    """Adds every method's options to a command, once each, naming the methods that have it."""
    owners: dict[str, list[str]] = {}
    fields: dict[str, dataclasses.Field] = {}
    defaults: dict[str, dict[str, object]] = {}
    for name in methods.MODULES:
        for field in dataclasses.fields(methods.find(name).Options):
            owners.setdefault(field.name, []).append(name)
            fields.setdefault(field.name, field)
            defaults.setdefault(field.name, {})[name] = field.default
    for name, field in reversed(fields.items()):
        flag = f"--{name.replace('_', '-')}"
        values = defaults[name]
        shown = (
            str(field.default)
            if len(set(values.values())) == 1
            else ", ".join(f"{method} {value}" for method, value in values.items())
        )
        help_text = f"[{', '.join(owners[name])}] {field.metadata['help']} (default: {shown})"
        if isinstance(field.default, bool):
            decorator = click.option(f"{flag}/--no-{name.replace('_', '-')}", name, default=None, help=help_text)
        else:
            kind = click.Choice(field.metadata["choices"]) if "choices" in field.metadata else type(field.default)
            decorator = click.option(flag, name, type=kind, default=None, help=help_text)
        command = decorator(command)
    return command


@main.command()
@click.option("--model", default=DEFAULT_MODEL, show_default=True, help="Folder, hub id or .gguf file.")
@click.option("--method", default="fista", show_default=True, help="See `llmcompress methods`.")
@click.option("--sparsity", default="2:4", show_default=True, help=f"What to remove: {ACCEPTED}.")
@click.option("--out", type=click.Path(), help="Folder of the result. [default: MODEL-METHOD-SPARSITY]")
@click.option("--overwrite", is_flag=True, help="Replace a checkpoint that stands at --out.")
@click.option(
    "--calibration",
    help="c4, wikitext2, OWNER/NAME[:config], FILE (.txt, .jsonl, .parquet) or self (text the model writes itself). "
    "[default: c4 when the hub can be reached, else self]",
)
@click.option("--samples", default=128, show_default=True, help="Calibration sequences.")
@click.option("--seq-len", type=int, help="Their length in tokens. [default: 2048, or the model's maximum if less]")
@click.option("--text-field", default="text", show_default=True, help="Column of a .jsonl, .parquet or hub row.")
@click.option("--seed", default=0, show_default=True, help="Same seed, same bits.")
@click.option(
    "--error-correction",
    type=click.Choice(["layer", "sequential", "model", "off"]),
    help="Where a layer's dense and compressed inputs come from. [default: the method's own]",
)
@click.option("--targets", multiple=True, help="Only these linears, as 'self_attn.*' or 'layers.0.mlp.*'; repeatable.")
@click.option("--device", default="auto", show_default=True, help="cpu, cuda, cuda:N or auto.")
@click.option("--max-memory", help="What the process may take, as 4GiB. [default: what is free]")
@click.option("--perplexity", help="Measure on this text file, or wikitext2, before and after.")
@click.option("--workers", default=1, show_default=True, help="Layers at once, as Ray tasks (llmcompress[ray]).")
@click.option("--ray-address", help="A running Ray cluster whose machines all see --model and --out.")
@click.option("--resume", is_flag=True, help="Go on with an unfinished run at --out; the bits will be the same.")
@click.option("--trust-remote-code", is_flag=True, help="Let the model folder's own Python code run.")
@click.option("--log-json", type=click.Path(), help="Append one JSON line per event to this file.")
@click.option("--quiet", is_flag=True, help="Print nothing but errors.")
@method_options
def prune(
    model, method, sparsity, out, overwrite, calibration, samples, seq_len, text_field, seed, error_correction,
    targets, device, max_memory, perplexity, workers, ray_address, resume,
    trust_remote_code, log_json, quiet, **options,
) -> None:  # fmt: skip
    """Prune the linears inside a model's decoder layers."""
    given = {name: value for name, value in options.items() if value is not None}
    methods.make_options(method, given)
    from llmcompress import sparsity as patterns
    from llmcompress.calibration.tokens import Calibration, default_source
    from llmcompress.pipeline import prune as run
    from llmcompress.report.console import Console
    from llmcompress.report.log import JsonLog

    pattern = patterns.parse(sparsity)
    if calibration is None:
        calibration = default_source()
    # Not the stem: the names of models are full of dots.
    name = os.path.basename(os.path.abspath(model)).removesuffix(".gguf")
    out = out or f"{name}-{method}-{str(pattern).replace(':', 'of')}"
    with Console(quiet) as console, JsonLog(log_json) as log:
        run(
            default_model() if model == DEFAULT_MODEL else model,
            method=method,
            sparsity=pattern,
            out=out,
            calibration=Calibration(calibration, samples, seq_len, seed, text_field),
            error_correction=error_correction,
            targets=targets,
            device=device,
            max_memory=max_memory,
            perplexity=perplexity,
            workers=workers,
            ray_address=ray_address,
            resume=resume,
            overwrite=overwrite,
            trust_remote_code=trust_remote_code,
            on_event=lambda kind, data: [show(kind, data) for show in (console.on_event, log.on_event)],
            **given,
        )


def default_model() -> str:
    from llmcompress.checkpoint.default import find_default

    return find_default(DEFAULT_MODEL)


@main.command("eval")
@click.argument("model")
@click.option("--perplexity", "source", required=True, help="A text file, or wikitext2.")
@click.option("--seq-len", type=int, help="Window length in tokens. [default: 2048, or the model's maximum if less]")
@click.option("--max-windows", type=click.IntRange(1), help="Stop after this many windows.")
@click.option("--device", default="auto", show_default=True, help="cpu, cuda, cuda:N or auto.")
@click.option("--trust-remote-code", is_flag=True, help="Let the model folder's own Python code run.")
@click.option("--quiet", is_flag=True, help="Print the number only.")
def evaluate(model, source, seq_len, max_windows, device, trust_remote_code, quiet) -> None:
    """Perplexity of a dense or compressed model.

    The text is one stream of tokens, cut into windows that don't overlap; the mean runs over predicted tokens.
    """
    from llmcompress.evaluate.perplexity import evaluate_perplexity
    from llmcompress.report.console import Console

    console = Console(quiet)
    with console:
        result = evaluate_perplexity(model, source, seq_len, max_windows, device, trust_remote_code, console.on_event)
    if quiet:
        click.echo(f"{result.value:.6g}")
    else:
        console.perplexity(model, result)


@main.command("methods")
def list_methods() -> None:
    """List the methods and their options."""
    for name in methods.MODULES:
        module = methods.find(name)
        click.echo(f"{name:<10} {module.__doc__.splitlines()[0]}")
        for field in dataclasses.fields(module.Options):
            click.echo(f"{'':<10}   --{field.name.replace('_', '-')} ({field.default}): {field.metadata['help']}")


@main.command()
@click.argument("model")
def inspect(model) -> None:
    """Show a checkpoint: layers, zeros counted in its weights, what was done to it."""
    from llmcompress.report.console import Console
    from llmcompress.report.inspect import inspect as read

    with Console() as console:
        console.inspection(read(model))


@main.command()
@click.option("--out", type=click.Path(), default="smollm2-135m-2of4", show_default=True, help="Folder of the result.")
@click.option("--model", default=DEFAULT_MODEL, show_default=True, help="Folder, hub id or .gguf file.")
@click.option("--calibration", default="self", show_default=True, help="As for `prune`.")
@click.option("--perplexity", "source", help="Text file to evaluate on. [default: the held-out text in the package]")
@click.option("--quiet", is_flag=True, help="Print the table only.")
def quickstart(out, model, calibration, source, quiet) -> None:
    """Prune a small model to 2:4 with every method and compare them: a few minutes, no data, no GPU."""
    from llmcompress.quickstart import quickstart as run
    from llmcompress.report.console import Console

    with Console(quiet) as console:
        rows = run(default_model() if model == DEFAULT_MODEL else model, out, calibration, source, console.on_event)
        console.comparison(rows, out)


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    main()
