"""A model larger than the memory that it is compressed in: makes one, caps the process, prints its peak.

    python tests/bench/bench_memory.py --folder /tmp/big --cap 5 -- --method wanda
    python tests/bench/bench_memory.py --folder /tmp/big --cap 5 -- --method fista --rounds 1 --iterations 2

The model is a random Llama in bfloat16 (hidden 4096, intermediate 11008, about 10 GB with 24 layers). The cap is a
memory cgroup where this user may make one: the kernel kills the run that goes over it. What follows `--` goes to
`llmcompress prune`. The ratio printed is peak memory to the size of the model.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import LlamaConfig

GIB = 2**30
LAYERS_PER_FILE = 4


def make(folder: Path, layers: int) -> None:
    """Random weights, a few layers a file, never more than one file in memory."""
    config = LlamaConfig(
        hidden_size=4096, intermediate_size=11008, num_hidden_layers=layers, num_attention_heads=32,
        num_key_value_heads=32, vocab_size=32000, max_position_embeddings=2048, tie_word_embeddings=False,
        dtype=torch.bfloat16, architectures=["LlamaForCausalLM"],
    )  # fmt: skip
    folder.mkdir(parents=True)
    hidden, inner = config.hidden_size, config.intermediate_size
    shapes = {f"self_attn.{name}_proj": (hidden, hidden) for name in "qkvo"}
    shapes |= {"mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden), "mlp.down_proj": (hidden, inner)}
    generator, weight_map = torch.Generator().manual_seed(0), {}

    def random(*shape: int) -> torch.Tensor:
        return (torch.randn(shape, generator=generator) * 0.02).bfloat16()

    def write(name: str, tensors: dict[str, torch.Tensor]) -> None:
        save_file(tensors, folder / name, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(tensors, name))

    norm = torch.ones(hidden, dtype=torch.bfloat16)
    for start in range(0, layers, LAYERS_PER_FILE):
        tensors = {}
        for i in range(start, min(start + LAYERS_PER_FILE, layers)):
            prefix = f"model.layers.{i}."
            tensors |= {f"{prefix}{name}.weight": random(*shape) for name, shape in shapes.items()}
            tensors |= {f"{prefix}{name}.weight": norm for name in ("input_layernorm", "post_attention_layernorm")}
        write(f"model-{start:05d}.safetensors", {k: v.clone() for k, v in tensors.items()})
    outside = {name: random(config.vocab_size, hidden) for name in ("model.embed_tokens.weight", "lm_head.weight")}
    write("model-other.safetensors", {**outside, "model.norm.weight": norm})
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    config.save_pretrained(folder)


def cgroup(cap: int) -> Path | None:
    """A new memory cgroup with a hard limit, or None where none can be made."""
    for root, limit in (("/sys/fs/cgroup/memory", "memory.limit_in_bytes"), ("/sys/fs/cgroup", "memory.max")):
        path = Path(root) / f"llmcompress-{os.getpid()}"
        try:
            path.mkdir()
            (path / limit).write_text(str(cap))
            return path
        except OSError:
            if path.is_dir():
                path.rmdir()
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--cap", type=float, default=5.0, help="GiB")
    parser.add_argument("--samples", type=int, default=2)
    parser.add_argument("--seq-len", type=int, default=256)
    parser.add_argument("prune", nargs="*")
    args = parser.parse_args()
    if not args.folder.exists():
        make(args.folder, args.layers)
    size = sum(path.stat().st_size for path in args.folder.glob("*.safetensors"))
    cap = int(args.cap * GIB)
    group = cgroup(cap)
    print(f"model {size / 1e9:.2f} GB, cap {args.cap} GiB: {'cgroup ' + str(group) if group else 'no cgroup here'}")

    def enter() -> None:
        if group:
            (group / "cgroup.procs").write_text(str(os.getpid()))

    script = (
        "import sys, torch, llmcompress\n"
        "from llmcompress import cli, pipeline\n"
        # Random weights say nothing about text, so random tokens calibrate them as well as any.
        "def drawn(source, calibration, device):\n"
        "    g = torch.Generator().manual_seed(calibration.seed)\n"
        "    return torch.randint(32000, (calibration.samples, calibration.seq_len), generator=g)\n"
        "pipeline.draw_tokens = drawn\n"
        "cli.main(sys.argv[1:])\n"
    )
    out = args.folder.with_name(f"{args.folder.name}-out")
    command = [
        sys.executable, "-c", script, "prune", "--model", str(args.folder), "--out", str(out), "--overwrite",
        "--calibration", "self", "--samples", str(args.samples), "--seq-len", str(args.seq_len), "--max-memory",
        f"{args.cap - 0.25}GiB", *args.prune,
    ]  # fmt: skip
    begun = time.perf_counter()
    done = subprocess.run(command, preexec_fn=enter)
    seconds = time.perf_counter() - begun
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    if group:
        time.sleep(1)
        group.rmdir()
    verdict = "within" if done.returncode == 0 and peak <= cap else "NOT within"
    print(f"exit code {done.returncode}, {seconds:.0f} s, peak RSS {peak / GIB:.2f} GiB, {verdict} {args.cap} GiB")
    print(f"ratio of peak memory to model size {peak / size:.3f}")
    sys.exit(done.returncode)


if __name__ == "__main__":
    main()
