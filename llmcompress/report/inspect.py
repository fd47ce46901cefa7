"""What a checkpoint holds, counted in its weights."""

from __future__ import annotations

import json
import os
from typing import Any

from llmcompress.calibration.engine import stages_of
from llmcompress.checkpoint.output import MANIFEST
from llmcompress.checkpoint.skeleton import Skeleton
from llmcompress.checkpoint.source import open_source
from llmcompress.sparsity import NM

PATTERNS = (NM(1, 4), NM(2, 4), NM(4, 8))


def inspect(model: str | os.PathLike) -> dict[str, Any]:
    """Per layer the zeros and the n:m pattern of its linears; sizes; the manifest's account. Raises BadInput."""
    source = open_source(model)
    skeleton = Skeleton(source)
    layers, parameters = [], 0
    for i in range(len(skeleton.layers)):
        layer = skeleton.read_layer(i)
        stages = stages_of(skeleton.family, layer, frozenset())
        weights = [m.weight for stage in stages for group in stage.groups for m in group.linears.values()]
        total = sum(w.numel() for w in weights)
        zeros = sum(int((w == 0).sum()) for w in weights)
        fits = [p for p in PATTERNS if all(w.shape[1] % p.m == 0 and p.holds(w) for w in weights)]
        count = sum(p.numel() for p in layer.parameters())
        parameters += count
        layers.append(
            {
                "layer": i,
                "parameters": count,
                "sparsity": zeros / total if total else 0.0,
                "pattern": str(fits[0]) if fits else "-",
            }
        )
    for tensor in source.read(skeleton.other_names()).values():
        parameters += tensor.numel()
    return {
        "model": source.name,
        "family": skeleton.family.name,
        "dtype": str(skeleton.dtype).removeprefix("torch."),
        "layers": layers,
        "parameters": parameters,
        "bytes": source.bytes,
        "files": len(set(source.files.values())),
        "history": history(source),
    }


def history(source) -> str:
    path = source.folder / MANIFEST
    if not path.is_file():
        return "No llmcompress.json: not written by llmcompress."
    manifest = json.loads(path.read_text(encoding="utf-8"))
    recipe = manifest["recipe"]
    return (
        f"Made from {manifest['model']} by {recipe['method']} {recipe['sparsity']} (llmcompress.json has all settings)."
    )
