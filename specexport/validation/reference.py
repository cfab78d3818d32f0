"""The independent reference: transformers' own model in PyTorch, fp32."""

from collections.abc import Sequence
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from specexport.errors import CheckpointError
from specexport.export.checkpoint import Checkpoint, is_gguf, open_checkpoint
from specexport.export.decoder import EMBEDDING
from specexport.export.manifest import FloatType
from specexport.export.moe import is_router


class Reference:
    """A checkpoint as transformers runs it, its matrices rounded as a bundle stores them."""

    def __init__(self, source: str, weight_type: FloatType = "fp32") -> None:
        """Load the checkpoint that a bundle was built from."""
        self._checkpoint = open_checkpoint(source)
        self.model = _load(source, self._checkpoint)
        _round(self.model, weight_type)

    def logits(self, token_ids: Sequence[int]) -> NDArray[np.float32]:  # [T] -> [T, V]
        """Teacher-forced logits after each token."""
        with torch.inference_mode():
            output = self.model(torch.tensor([list(token_ids)]), use_cache=False)
        return np.asarray(output.logits[0].float().numpy())

    def greedy(
        self, token_ids: Sequence[int], num_tokens: int, eos_token_ids: Sequence[int]
    ) -> list[int]:
        """Greedy continuation with transformers' own cache and generation loop."""
        from transformers import GenerationConfig

        config = GenerationConfig(
            max_new_tokens=num_tokens,
            do_sample=False,
            eos_token_id=list(eos_token_ids) or None,
            pad_token_id=0,
        )
        inputs = torch.tensor([list(token_ids)])
        with torch.inference_mode():
            output = self.model.generate(
                inputs, attention_mask=torch.ones_like(inputs), generation_config=config
            )
        return [int(i) for i in output[0, len(token_ids) :]]


def _load(source: str, checkpoint: Checkpoint) -> Any:  # noqa: ANN401 - transformers' classes
    import transformers

    transformers.utils.logging.set_verbosity_error()
    # MiMo's own class is code on the hub; its body is Qwen2's.
    is_mimo = checkpoint.config.get("model_type") == "mimo"
    model_class = transformers.Qwen2ForCausalLM if is_mimo else transformers.AutoModelForCausalLM
    load = model_class.from_pretrained
    path = Path(source).expanduser()
    try:
        with redirect_stderr(StringIO()):  # progress bars that no setting turns off
            if path.is_file() and is_gguf(path):
                model = load(path.parent, gguf_file=path.name, dtype=torch.float32)
                _share_twins(model, checkpoint)
            else:
                model = load(getattr(checkpoint, "path", source), dtype=torch.float32)
    except (OSError, ValueError, RuntimeError) as error:
        first = str(error).splitlines()[0]
        raise CheckpointError(f"transformers cannot load {source}: {first}") from None
    model.generation_config = transformers.GenerationConfig()  # no hidden penalties
    return model.eval()


def _round(model: Any, weight_type: FloatType) -> None:  # noqa: ANN401
    """Round what a bundle rounds, so that what is left to compare is the export."""
    dtype = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[weight_type]
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1 and not is_router(name):
                parameter.copy_(parameter.to(dtype).float())


def _share_twins(model: Any, checkpoint: Checkpoint) -> None:  # noqa: ANN401
    """Where a GGUF holds two quantizations of one tied matrix, use the one that the bundle has."""
    twin = model.get_output_embeddings().weight
    if (
        checkpoint.config.get("tie_word_embeddings")
        and twin is not model.get_input_embeddings().weight
    ):
        shared = torch.nn.Parameter(torch.from_numpy(checkpoint.tensor(EMBEDDING)))
        model.get_input_embeddings().weight = shared
        model.get_output_embeddings().weight = shared
