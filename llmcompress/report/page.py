"""The report of a run: one HTML file that opens offline, and its pictures as PNG."""

from __future__ import annotations

import base64
import html
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("agg")

from matplotlib import pyplot  # noqa: E402

INK, FAINT, ACCENT = "#1f2933", "#d5dbe1", "#1b6ca8"
STYLE = """
:root { color-scheme: light; }
body { font: 16px/1.5 system-ui, sans-serif; color: #1f2933; background: #fff; margin: 0 auto; max-width: 60rem;
  padding: 1.5rem 1rem 3rem; }
h1 { font-size: 1.5rem; line-height: 1.25; margin: 0 0 .25rem; overflow-wrap: anywhere; }
h2 { font-size: 1.1rem; margin: 2rem 0 .5rem; }
p { margin: .25rem 0 .75rem; max-width: 44rem; }
img { display: block; width: 100%; max-width: 44rem; height: auto; }
dl { display: grid; grid-template-columns: repeat(auto-fit, minmax(9rem, 1fr)); gap: .75rem; margin: 1rem 0; }
dt { font-size: .8rem; color: #52606d; } dd { margin: 0; font-size: 1.25rem; overflow-wrap: anywhere; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; font-size: .875rem; width: 100%; }
th, td { text-align: right; padding: .25rem .6rem; border-bottom: 1px solid #d5dbe1; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; } .warning { border-left: 3px solid #c05621; padding-left: .75rem; }
footer { margin-top: 2rem; font-size: .8rem; color: #52606d; overflow-wrap: anywhere; }
"""


def write_report(folder: Path, manifest: dict[str, Any]) -> None:
    """Writes report.html and report-*.png into a checkpoint folder from its manifest (llmcompress.json)."""
    pictures = {}
    for name, draw in PICTURES.items():
        figure = draw(manifest)
        if figure is not None:
            path = folder / f"report-{name}.png"
            figure.savefig(path, dpi=220)
            pyplot.close(figure)
            pictures[name] = base64.b64encode(path.read_bytes()).decode()
    (folder / "report.html").write_text(page(manifest, pictures), encoding="utf-8")


def page(manifest: dict[str, Any], pictures: dict[str, str]) -> str:
    recipe, layers = manifest["recipe"], manifest["layers"]
    title = f"{Path(manifest['model']).name}: {recipe['method']} {recipe['sparsity']}"
    body = [f"<h1>{html.escape(title)}</h1>", f"<p>{html.escape(summary(manifest))}</p>", headline(manifest)]
    body += [f'<p class="warning">{html.escape(warning)}</p>' for warning in manifest["warnings"]]
    for name, (heading, text) in HEADINGS.items():
        if name in pictures:
            alt = html.escape(f"{heading}. {text}")
            body.append(f"<h2>{heading}</h2><p>{text}</p>")
            body.append(f'<img alt="{alt}" src="data:image/png;base64,{pictures[name]}">')
    body.append("<h2>What the written files hold</h2>")
    rows = [
        (kind, f"{c['parameters']:,}", f"{c['zeros']:,}", f"{c['sparsity']:.2%}")
        for kind, c in manifest["totals"].items()
    ]
    body.append(table(("class", "parameters", "zeros", "sparsity"), rows))
    body.append("<h2>Layers</h2>")
    rows = [
        (f["layer"], f"{f['error']:.4f}", f"{f['sparsity']:.2%}", f"{f['seconds']:.1f}", gib(f["peak_memory"]))
        for f in layers
    ]
    body.append(table(("layer", "error", "sparsity", "seconds", "peak memory"), rows))
    versions = ", ".join(f"{name} {version}" for name, version in manifest["versions"].items())
    body.append(f"<footer>{html.escape(versions)}. Source sha256 {manifest['source_sha256']}.</footer>")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{html.escape(title)}</title><style>{STYLE}</style></head>\n<body>\n"
        + "\n".join(body)
        + "\n</body></html>\n"
    )


def summary(manifest: dict[str, Any]) -> str:
    recipe = manifest["recipe"]
    used = recipe["calibration"]
    text = f"Made from {manifest['model']}."
    if used:
        text += f" Calibrated on {used['samples']} sequences of {used['seq_len']} tokens of {used['source']}"
        text += f", seed {used['seed']}, error correction {recipe['error_correction']}."
    return text


def headline(manifest: dict[str, Any]) -> str:
    pruned = manifest["totals"]["pruned linears"]
    facts = {"zeros in pruned linears": f"{pruned['sparsity']:.2%}"}
    quality = manifest.get("perplexity")
    if quality:
        facts["perplexity, dense"] = f"{quality['before']:.2f}"
        facts["perplexity, compressed"] = f"{quality['after']:.2f}"
    facts["time"] = minutes(manifest["seconds"]["total"])
    facts["peak memory"] = gib(max(f["peak_memory"] for f in manifest["layers"]))
    return "<dl>" + "".join(f"<div><dt>{k}</dt><dd>{v}</dd></div>" for k, v in facts.items()) + "</dl>"


def table(head: tuple[str, ...], rows: list[tuple]) -> str:
    lines = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="scroll"><table><tr>{"".join(f"<th>{h}</th>" for h in head)}</tr>{lines}</table></div>'


def gib(size: float) -> str:
    return f"{size / 2**30:.2f} GiB"


def minutes(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.1f} min"


def axes(width: float = 5.2, height: float = 2.6):
    """A figure without boxes and with faint horizontal lines."""
    figure, plot = pyplot.subplots(figsize=(width, height), layout="constrained")
    plot.spines[["top", "right"]].set_visible(False)
    plot.spines[["left", "bottom"]].set_color(FAINT)
    plot.tick_params(colors=INK, length=0)
    plot.grid(axis="y", color=FAINT, linewidth=0.6)
    plot.set_axisbelow(True)
    return figure, plot


def error_by_layer(manifest: dict[str, Any]):
    figure, plot = axes()
    errors = [facts["error"] for facts in manifest["layers"]]
    plot.plot(range(len(errors)), errors, color=ACCENT, marker="o", markersize=4)
    plot.set_ylim(bottom=0)
    plot.set_xlabel("decoder layer")
    plot.set_ylabel("relative error")
    plot.xaxis.get_major_locator().set_params(integer=True)
    return figure


def linears_by_layer(manifest: dict[str, Any]):
    """Relative output error of every linear, or its sparsity where no tokens were seen."""
    layers = manifest["layers"]
    names = list(dict.fromkeys(name for facts in layers for name in facts["linears"]))
    if not names or len(names) > 40:
        return None
    key = "error" if any("error" in f for facts in layers for f in facts["linears"].values()) else "sparsity"
    values = [[facts["linears"].get(name, {}).get(key, float("nan")) for facts in layers] for name in names]
    figure, plot = axes(height=1.0 + 0.26 * len(names))
    plot.grid(False)
    image = plot.imshow(values, aspect="auto", cmap="Blues", vmin=0)
    plot.set_yticks(range(len(names)), names)
    plot.set_xlabel("decoder layer")
    plot.xaxis.get_major_locator().set_params(integer=True)
    figure.colorbar(image, label=f"relative {key}" if key == "error" else key, fraction=0.04)
    return figure


def time_by_part(manifest: dict[str, Any]):
    seconds = {name: value for name, value in manifest["seconds"].items() if name != "total"}
    seconds["other"] = max(0.0, manifest["seconds"]["total"] - sum(seconds.values()))
    order = sorted(seconds, key=seconds.get)
    figure, plot = axes(height=0.6 + 0.26 * len(order))
    plot.grid(False)
    bars = plot.barh(order, [seconds[name] for name in order], color=ACCENT)
    plot.bar_label(bars, fmt="%.1f s", padding=4, color=INK)
    plot.spines["bottom"].set_visible(False)
    plot.set_xticks([])
    plot.margins(x=0.12)
    return figure


def quality(manifest: dict[str, Any]):
    measured = manifest.get("perplexity")
    if not measured:
        return None
    figure, plot = axes(height=1.3)
    plot.grid(False)
    bars = plot.barh(["compressed", "dense"], [measured["after"], measured["before"]], color=[ACCENT, FAINT])
    plot.bar_label(bars, fmt="%.2f", padding=4, color=INK)
    plot.spines["bottom"].set_visible(False)
    plot.set_xticks([])
    plot.margins(x=0.12)
    return figure


PICTURES = {"quality": quality, "error": error_by_layer, "linears": linears_by_layer, "time": time_by_part}
HEADINGS = {
    "quality": ("Perplexity before and after", "Lower is better; non-overlapping windows."),
    "error": (
        "Error after each layer",
        "Distance of the hidden states to the dense model's, relative to their size, on a short calibration text.",
    ),
    "linears": (
        "Every linear",
        "What each linear's own output lost on calibration tokens (or its sparsity, for a method without data).",
    ),
    "time": ("Where the time went", "Seconds by part of the run."),
}
