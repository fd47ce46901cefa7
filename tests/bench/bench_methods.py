"""Methods side by side on one model: perplexity, ratio to the first row, wall time and where it went.

    python tests/bench/bench_methods.py --model MODEL --calibration FILE --text FILE \
        'sparsegpt 2:4' 'fista 2:4' 'fista 2:4 rounds=0 refit=false'

Every argument is one run: method, sparsity, then options of the method or `error_correction=...`. Ratios are taken
to the first run of the same sparsity. The quality claims of the README come from this script.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shutil
import tempfile
import time
from pathlib import Path

import llmcompress
from llmcompress import methods
from llmcompress.checkpoint.source import open_source
from llmcompress.evaluate.perplexity import perplexity, window_tokens
from llmcompress.pipeline import draw_tokens
from llmcompress.report.console import silence_libraries


def typed(method: str, pairs: list[str]) -> dict[str, object]:
    """`name=value` texts with the types that the method's options have."""
    kinds = {f.name: type(f.default) for f in dataclasses.fields(methods.find(method).Options)}
    given = {}
    for pair in pairs:
        name, _, text = pair.partition("=")
        kind = kinds.get(name, str)
        given[name] = text == "true" if kind is bool else kind(text)
    return given


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--calibration", required=True)
    parser.add_argument("--text", required=True)
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--seq-len", type=int, default=512)
    parser.add_argument("--window", type=int, default=1024)
    parser.add_argument("--windows", type=int, default=40)
    parser.add_argument("--log", help="append one JSON line per run")
    parser.add_argument("runs", nargs="+")
    args = parser.parse_args()
    silence_libraries()
    source = open_source(args.model)
    windows = window_tokens(args.text, source.tokenizer(), args.window, args.windows)
    tokens = llmcompress.Calibration(args.calibration, args.samples, args.seq_len)
    tokens = tokens.drawn(draw_tokens(source, tokens))
    first: dict[str, tuple[float, float]] = {}
    print(f"dense {perplexity(llmcompress.load(args.model), windows).value:.3f}", flush=True)
    print("| run | perplexity | ratio | seconds | ratio | breakdown |\n|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as work:
        for run in args.runs:
            method, sparsity, *pairs = run.split()
            out = Path(work) / "out"
            begun = time.perf_counter()
            result = llmcompress.prune(args.model, method, sparsity, out, tokens, **typed(method, pairs))
            seconds = time.perf_counter() - begun
            value = perplexity(llmcompress.load(out), windows).value
            shutil.rmtree(out)
            base, base_seconds = first.setdefault(sparsity, (value, seconds))
            parts = ", ".join(f"{k} {v:.0f}" for k, v in result.seconds.items() if k != "total")
            ratio, time_ratio = value / base, seconds / base_seconds
            print(f"| {run} | {value:.2f} | {ratio:.3f} | {seconds:.0f} | {time_ratio:.2f} | {parts} |", flush=True)
            if args.log:
                with open(args.log, "a", encoding="utf-8") as file:
                    file.write(json.dumps({"run": run, "perplexity": value, "seconds": result.seconds}) + "\n")


if __name__ == "__main__":
    main()
