"""Reading a model: a local folder, a hub id or a .gguf file becomes names of tensors that are read when asked."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import SafetensorError, safe_open

from llmcompress.errors import BadInput
from llmcompress.families import find

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig

PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack")
HUB_FILES = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja", "LICENSE*"]
CHUNK = 2**26
PICKLE_HINT = (
    "pickled files can run code when opened and are refused; convert them once where they are trusted, with "
    "AutoModelForCausalLM.from_pretrained(DIR).save_pretrained(NEW_DIR), and give NEW_DIR"
)


@dataclass(frozen=True)
class Source:
    """A checkpoint on disk.

    name: what the user typed. folder: where its files are. files: tensor name -> safetensors file.
    """

    name: str
    folder: Path
    files: dict[str, Path]
    trust_remote_code: bool = False

    @cached_property
    def config(self) -> PretrainedConfig:
        from huggingface_hub.errors import StrictDataclassError
        from transformers import AutoConfig

        try:
            return AutoConfig.from_pretrained(self.folder, trust_remote_code=self.trust_remote_code)
        except (ValueError, OSError, KeyError) as error:
            reason = str(error).splitlines()[0]
        except StrictDataclassError as error:
            # What is wrong stands in its last line.
            reason = str(error).splitlines()[-1].strip()
        raise BadInput(f"{self.name}: its config.json can't be used: {reason}")

    def check_decoder(self) -> None:
        """Raises BadInput for a model that is not a decoder-only language model."""
        config = self.config
        architectures = getattr(config, "architectures", None) or []
        if getattr(config, "is_encoder_decoder", False) or (
            architectures and not any("CausalLM" in a or "LMHead" in a for a in architectures)
        ):
            raise BadInput(
                f"{self.name} is a {config.model_type} model ({', '.join(architectures)}), not a decoder-only "
                "language model; give a ...ForCausalLM checkpoint."
            )

    def tokenizer(self):
        from transformers import AutoTokenizer

        try:
            return AutoTokenizer.from_pretrained(self.folder, trust_remote_code=self.trust_remote_code)
        except (ValueError, OSError, KeyError, ImportError) as error:
            reason = str(error).splitlines()[0].rstrip(": ")
            raise BadInput(
                f"{self.name}: no tokenizer could be loaded from it ({reason}); put the model's tokenizer files there."
            ) from error

    def read(self, names: list[str]) -> dict[str, torch.Tensor]:
        """The named tensors, copied out of the mapped files, which are closed again. Raises BadInput."""
        tensors = {}
        by_file: dict[Path, list[str]] = {}
        for name in names:
            by_file.setdefault(self.files[name], []).append(name)
        for path, wanted in by_file.items():
            # Opened anew each time: a mapping that stays open counts every page ever read as resident.
            with open_shard(path) as shard:
                for name in wanted:
                    tensors[name] = shard.get_tensor(name).clone()
        return tensors

    def map(self, name: str) -> torch.Tensor:
        """The named tensor, mapped from its file for as long as it lives; read only."""
        with open_shard(self.files[name]) as shard:
            return shard.get_tensor(name)

    def headers(self) -> dict[str, tuple[str, list[int]]]:
        """dtype, as safetensors writes it ("F32", "BF16"), and shape of every tensor, without reading any."""
        found = {}
        for path in sorted(set(self.files.values())):
            with open_shard(path) as shard:
                for name in [name for name, file in self.files.items() if file == path]:
                    piece = shard.get_slice(name)
                    found[name] = (piece.get_dtype(), piece.get_shape())
        return found

    def check(self, on_file=lambda done, total: None) -> str:
        """Reads every byte once: the sha256 over all shards. Raises BadInput on the first non-finite tensor."""
        leftovers = find(self.config.model_type).leftovers
        digest = hashlib.sha256()
        shards = sorted(set(self.files.values()))
        for number, path in enumerate(shards):
            with open(path, "rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
            # One mapping per tensor: what stays mapped counts as resident, and a shard may be larger than memory.
            for name in [name for name, file in self.files.items() if file == path and not name.endswith(leftovers)]:
                if not all(part.isfinite().all() for part in self.map(name).flatten().split(CHUNK)):
                    raise BadInput(f"tensor {name} of {path.name} holds NaN or Inf; repair or download it again.")
            on_file(number + 1, len(shards))
        return digest.hexdigest()

    @property
    def bytes(self) -> int:
        return sum(path.stat().st_size for path in set(self.files.values()))


def open_shard(path: Path):
    """safe_open with an error that names the file and what to do. Raises BadInput."""
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise BadInput(
            f"{path} is not a whole safetensors file ({error}); it is truncated or damaged, fetch it again."
        ) from error


def open_source(model: str | os.PathLike, trust_remote_code: bool = False) -> Source:
    """Finds a model given as folder, .gguf file or hub id, and lists its tensors. Raises BadInput."""
    name = os.fspath(model)
    path = Path(name)
    if path.suffix == ".gguf":
        from llmcompress.checkpoint.gguf import convert

        return replace_name(open_folder(convert(path)), name)
    if path.is_file():
        if path.suffix in PICKLED:
            raise BadInput(f"{name}: {PICKLE_HINT}.")
        raise BadInput(f"{name} is a file; give a model folder, a .gguf file or a hub id.")
    folder = path if path.is_dir() else download(name)
    source = open_folder(folder, trust_remote_code)
    return replace_name(source, name)


def replace_name(source: Source, name: str) -> Source:
    return Source(name, source.folder, source.files, source.trust_remote_code)


def download(name: str) -> Path:
    """The hub's copy of `name`, through the local cache. Raises BadInput when there is none."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    missing = f"{name!r} is no folder or .gguf file here"
    try:
        return Path(snapshot_download(name, allow_patterns=HUB_FILES))
    except HFValidationError as error:
        raise BadInput(f"{missing}, and no valid hub id either (NAME or OWNER/NAME).") from error
    except LocalEntryNotFoundError as error:
        raise BadInput(f"{missing}, and the hub can't be reached; give a path that exists.") from error
    except (HfHubHTTPError, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise BadInput(f"{missing}, and the hub does not give it: {reason}") from error


def open_folder(folder: Path, trust_remote_code: bool = False) -> Source:
    """Lists the tensors of a checkpoint folder, sharded or single. Raises BadInput."""
    if not (folder / "config.json").is_file():
        raise BadInput(f"{folder} has no config.json; give a Hugging Face model folder.")
    # In the order of transformers: what else lies there (an adapter, the weights in another layout) is no part of it.
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    sharded = index.is_file() and not single.is_file()
    if sharded:
        try:
            weight_map = json.loads(index.read_text())["weight_map"]
            shards = sorted({str(file) for file in weight_map.values()})
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise BadInput(f"{index} is not a safetensors index ({error}); fetch it again.") from error
        gone = [file for file in shards if not (folder / file).is_file()]
        if gone:
            raise BadInput(f"{folder}: shard {gone[0]} is listed in its index and missing; fetch it again.")
        paths = [folder / file for file in shards]
    else:
        paths = [single] if single.is_file() else sorted(folder.glob("*.safetensors"))
    if not paths:
        pickled = sorted(p.name for p in folder.iterdir() if p.suffix in PICKLED)
        if pickled:
            raise BadInput(f"{folder} holds only {pickled[0]}: {PICKLE_HINT}.")
        raise BadInput(f"{folder} has no .safetensors weights.")
    files = {}
    for path in paths:
        with open_shard(path) as shard:
            files.update(dict.fromkeys(shard.keys(), path))
    if sharded:
        lost = sorted(set(weight_map) - set(files))
        if lost:
            raise BadInput(f"{folder}: tensor {lost[0]} is listed in its index and in no shard.")
    return Source(str(folder), folder, files, trust_remote_code)
