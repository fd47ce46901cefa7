"""Progress and results on a terminal; plain lines where there is none, nothing with --quiet."""

from __future__ import annotations

import shlex
import sys
from typing import Any

import rich.console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

WORTH = {
    "n:m": (
        "What this changes: the file and the memory stay as large as before, and no CPU runs it faster. NVIDIA GPUs "
        "from Ampere on can run 2:4 through torch.sparse.to_sparse_semi_structured, which pays at large batches."
    ),
    "unstructured": (
        "What this changes: the file and the memory stay as large as before (zeros are stored; they pack well in "
        "archives), and common runtimes run it no faster."
    ),
}


class Console:
    """One live bar at the bottom on a terminal, a line per event above it."""

    def __init__(self, quiet: bool = False):
        self.quiet = quiet
        self.console = rich.console.Console(highlight=False)
        self.progress = Progress(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
            TextColumn("ETA"), TimeRemainingColumn(elapsed_when_finished=False),
            console=self.console, transient=True, disable=quiet or not self.console.is_terminal,
        )  # fmt: skip
        self.tasks: dict[str, Any] = {}

    def __enter__(self) -> Console:
        silence_libraries()
        self.progress.start()
        return self

    def __exit__(self, *exception) -> None:
        self.progress.stop()

    def line(self, text: str) -> None:
        if not self.quiet:
            self.console.print(text, markup=False, soft_wrap=True)

    def bar(self, name: str, done: int, total: int) -> None:
        if name not in self.tasks:
            self.tasks[name] = self.progress.add_task(name, total=total)
        self.progress.update(self.tasks[name], completed=done)
        if done >= total:
            self.progress.remove_task(self.tasks.pop(name))

    def on_event(self, kind: str, data: dict[str, Any]) -> None:
        """Shows an event of the pipeline or of an evaluation."""
        if kind == "layer":
            self.line(
                f"layer {data['layer'] + 1}/{data['layers']}: zeros {data['sparsity']:.2%}, "
                + (f"hidden states {data['error']:.4f} from dense, " if "error" in data else "")
                + f"{data['seconds']:.1f} s, peak {data['peak_memory'] / 2**30:.2f} GiB"
            )
            self.bar("layers", data["done"], data["layers"])
        elif kind == "note":
            self.line(data["text"])
        elif kind == "done":
            self.result(data["result"])
        elif "done" in data:
            self.bar(kind, data["done"], data["total"])
        elif kind == "start":
            self.start(data)
        elif kind == "kept":
            again = shlex.join(["llmcompress", *(a for a in sys.argv[1:] if a != "--resume"), "--resume"])
            print(f"{data['finished']} of {data['layers']} layers are kept; go on with: {again}", file=sys.stderr)

    def start(self, data: dict[str, Any]) -> None:
        self.line(
            f"{data['method']} {data['pattern']}: {data['removed']:.1%} of each linear's weights go; these linears are "
            f"{data['coverage']:.1%} of the decoder layers"
        )
        if data["finished"]:
            self.line(f"resumed: {data['finished']} of {data['layers']} layers are finished already")
        if not data["lockstep"]:
            where = "in memory" if data["in_memory"] else "in files"
            self.line(
                f"memory: {data['memory_limit'] / 2**30:.2f} GiB allowed; hidden states {where}, batches one by one "
                "(slower than all at once)"
            )

    def result(self, result) -> None:
        if self.quiet:
            return
        table = Table(title="Measured in the written files", title_justify="left")
        for title in ("class", "parameters", "zeros", "sparsity"):
            table.add_column(title, justify="left" if title == "class" else "right")
        for kind, counts in result.totals.items():
            table.add_row(kind, f"{counts['parameters']:,}", f"{counts['zeros']:,}", f"{counts['sparsity']:.2%}")
        self.console.print(table)
        for warning in result.warnings:
            self.line(f"Warning: {warning}")
        self.line(", ".join(f"{name} {seconds:.1f} s" for name, seconds in result.seconds.items()))
        self.line(WORTH["n:m" if ":" in result.pattern else "unstructured"])
        if result.perplexity:
            before, after = result.perplexity["before"], result.perplexity["after"]
            self.line(f"perplexity {before:.2f} before, {after:.2f} after, on {result.perplexity['source']}")
        self.line(f"Verified and ready: {result.out} (look at report.html)")

    def perplexity(self, model: str, result) -> None:
        self.line(
            f"perplexity {result.value:.4g}  {model} on {result.source}, {result.windows} windows of "
            f"{result.seq_len} tokens, not overlapping"
        )

    def comparison(self, rows: list[dict[str, Any]], out: str) -> None:
        table = Table(title="2:4: two of every four weights removed", title_justify="left")
        for title in ("", "perplexity", "sparsity", "seconds", "size"):
            table.add_column(title, justify="left" if not title else "right")
        best = min(row["perplexity"] for row in rows if row["sparsity"])
        for row in rows:
            style = "bold" if row["perplexity"] == best else None
            table.add_row(
                row["name"], f"{row['perplexity']:.2f}", f"{row['sparsity']:.1%}" if row["sparsity"] else "-",
                f"{row['seconds']:.0f}" if row["seconds"] else "-", f"{row['bytes'] / 1e6:.0f} MB", style=style,
            )  # fmt: skip
        self.console.print(table)
        self.console.print(f"{rows[0]['text']}", markup=False, soft_wrap=True)
        self.console.print(WORTH["n:m"], markup=False, soft_wrap=True)
        self.console.print(f"Checkpoint (FISTA): {out}", markup=False, soft_wrap=True)

    def inspection(self, facts: dict[str, Any]) -> None:
        table = Table(title=f"{facts['model']}: {facts['family']}, {facts['dtype']}", title_justify="left")
        for title in ("layer", "parameters", "zeros in linears", "pattern found"):
            table.add_column(title, justify="right")
        for row in facts["layers"]:
            table.add_row(str(row["layer"]), f"{row['parameters']:,}", f"{row['sparsity']:.2%}", row["pattern"])
        self.console.print(table)
        self.line(f"{facts['parameters']:,} parameters in {facts['bytes'] / 1e6:.1f} MB of {facts['files']} files")
        self.line(facts["history"])


def silence_libraries() -> None:
    """Keeps other libraries' bars and notices out of the output."""
    import datasets
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    datasets.disable_progress_bars()
