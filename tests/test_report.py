"""The report of a run: one page that needs nothing else, and pictures of what the manifest says."""

import base64
import json
import re

import llmcompress
from llmcompress.report import page


def test_page_holds_every_picture_and_number_and_loads_nothing(llama, tmp_path, text):
    out = tmp_path / "out"
    result = llmcompress.prune(
        llama, "wanda", "2:4", out, llmcompress.Calibration(str(text), 8, 32), perplexity=str(text)
    )
    html = (out / "report.html").read_text(encoding="utf-8")
    pictures = sorted(path.name for path in out.glob("report-*.png"))
    assert pictures == ["report-error.png", "report-linears.png", "report-quality.png", "report-time.png"]
    embedded = [base64.b64decode(data) for data in re.findall(r'src="data:image/png;base64,([^"]+)"', html)]
    assert sorted(embedded) == sorted((out / name).read_bytes() for name in pictures)
    assert all(data.startswith(b"\x89PNG") for data in embedded)
    assert not re.findall(r'(?:src|href)="(?!data:)', html) and "http" not in html
    assert 'name="viewport"' in html
    for facts in result.layers:
        assert f"<td>{facts['error']:.4f}</td>" in html
    for value in (result.perplexity["before"], result.perplexity["after"]):
        assert f"<dd>{value:.2f}</dd>" in html


def test_perplexity_before_and_after_is_that_of_eval(llama, tmp_path, text):
    from llmcompress.evaluate.perplexity import evaluate_perplexity

    out = tmp_path / "out"
    result = llmcompress.prune(llama, "magnitude", "0.5", out, perplexity=str(text), max_memory="3GiB")
    for key, model in (("before", llama), ("after", out)):
        whole = evaluate_perplexity(str(model), str(text), None, None, "cpu", False)
        assert abs(result.perplexity[key] / whole.value - 1) < 1e-5
    assert result.perplexity["after"] != result.perplexity["before"]
    assert result.perplexity["windows"] == whole.windows
    assert json.loads((out / "llmcompress.json").read_text())["perplexity"] == result.perplexity


def test_names_from_outside_are_text_not_markup(llama, tmp_path, text):
    out = tmp_path / "out"
    llmcompress.prune(llama, "magnitude", "2:4", out)
    manifest = json.loads((out / "llmcompress.json").read_text())
    manifest["model"] = "<script>alert(1)</script>"
    manifest["warnings"] = ["<b>bold</b>"]
    html = page.page(manifest, {})
    assert "<script>" not in html and "<b>" not in html and "&lt;script&gt;" in html
