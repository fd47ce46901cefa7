"""Opening a finished checkpoint, strictly."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from llmcompress.checkpoint.source import open_source
from llmcompress.errors import BadInput

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def load(model: str | os.PathLike, device: str = "cpu", trust_remote_code: bool = False) -> PreTrainedModel:
    """The model of a folder, .gguf file or hub id, in its stored dtype, in eval mode.

    Raises BadInput when weights are missing, unexpected or of another shape: a model with a random remainder looks
    like one that works.
    """
    from transformers import AutoModelForCausalLM

    source = open_source(model, trust_remote_code)
    source.check_decoder()
    try:
        loaded, info = AutoModelForCausalLM.from_pretrained(
            source.folder, dtype="auto", trust_remote_code=trust_remote_code, output_loading_info=True
        )
    except (ValueError, OSError, RuntimeError) as error:
        raise BadInput(f"{source.name} can't be opened: {str(error).splitlines()[0]}") from error
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if info.get(kind):
            raise BadInput(f"{source.name} has {kind.replace('_', ' ')}: {sorted(map(str, info[kind]))[0]}, ...")
    return loaded.eval().to(device)
