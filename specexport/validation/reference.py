"""The independent reference: transformers' own model in PyTorch, fp32."""

import re
from collections.abc import Sequence
from contextlib import redirect_stderr
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from specexport.errors import CheckpointError
from specexport.export.checkpoint import Checkpoint, is_gguf, open_checkpoint
from specexport.export.decoder import EMBEDDING
from specexport.export.manifest import FINAL_NORM, FloatType, Tap
from specexport.export.moe import is_router


@dataclass(frozen=True, slots=True)
class ExtraLayer:
    """A decoder layer of the checkpoint that the model is loaded with, but does not run."""

    module: str
    """In the checkpoint."""
    number: int
    """Among the model's layers: how many there are otherwise."""


class Reference:
    """A checkpoint as transformers runs it, its matrices rounded as a bundle stores them."""

    def __init__(
        self, source: str, weight_type: FloatType = "fp32", extra: ExtraLayer | None = None
    ) -> None:
        """Load the checkpoint that a bundle was built from."""
        self._checkpoint = open_checkpoint(source)
        self.model = _load(source, self._checkpoint, extra)
        _round(self.model, weight_type)

    @property
    def embedding(self) -> torch.Tensor:
        """[V, H]."""
        found: torch.Tensor = self.model.get_input_embeddings().weight.detach()
        return found

    @property
    def output_matrix(self) -> torch.Tensor:
        """[V, H]."""
        found: torch.Tensor = self.model.get_output_embeddings().weight.detach()
        return found

    def taps(self, token_ids: Sequence[int], taps: Sequence[Tap]) -> torch.Tensor:
        """Hidden states after each token, side by side: [T, n * H]."""
        states: dict[Any, torch.Tensor] = {}

        def keep(module: Any, _: Any, output: Any) -> None:  # noqa: ANN401 - torch's signature
            states[module] = output[0] if isinstance(output, tuple) else output

        modules = [self._tapped(tap) for tap in taps]
        hooks = [module.register_forward_hook(keep) for module in modules]
        self.logits(token_ids)
        for hook in hooks:
            hook.remove()
        return torch.cat([states[module][0] for module in modules], dim=-1)

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

    def _tapped(self, tap: Tap) -> Any:  # noqa: ANN401 - transformers' classes
        """The module whose output `tap` is."""
        body = self.model.model
        if tap == FINAL_NORM:
            return body.norm
        return body.embed_tokens if tap == -1 else body.layers[tap]


def _load(source: str, checkpoint: Checkpoint, extra: ExtraLayer | None) -> Any:  # noqa: ANN401 - transformers' classes
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
                model = _load_directory(getattr(checkpoint, "path", path), checkpoint, extra)
    except CheckpointError:
        raise
    except Exception as error:  # of many classes, some of them huggingface_hub's own
        first = str(error).splitlines()[0]
        raise CheckpointError(f"transformers cannot load {source}: {first}") from None
    model.generation_config = transformers.GenerationConfig()  # no hidden penalties
    return model.eval()


def _load_directory(path: Path, checkpoint: Checkpoint, extra: ExtraLayer | None) -> Any:  # noqa: ANN401
    import transformers

    config_class: Any = transformers.AutoConfig
    model_class: Any = transformers.AutoModelForCausalLM
    if checkpoint.config.get("model_type") == "mimo":  # Qwen2's body; transformers has no MiMo
        config_class, model_class = transformers.Qwen2Config, transformers.Qwen2ForCausalLM
    config = config_class.from_pretrained(path)
    names = {}
    if extra is not None:
        _add_layer(config)
        names = {f"^{re.escape(extra.module)}\\.": f"model.layers.{extra.number}."}
    model, loaded = model_class.from_pretrained(
        path, config=config, dtype=torch.float32, key_mapping=names, output_loading_info=True
    )
    if missing := sorted(loaded["missing_keys"]):
        raise CheckpointError(f"transformers finds no tensor for {missing[0]!r} in {path}.")
    if extra is not None:
        model.config.num_hidden_layers = extra.number  # it runs as many of its layers
    return model


def _add_layer(config: Any) -> None:  # noqa: ANN401 - transformers' classes
    """One layer more, of the last one's kind."""
    config.num_hidden_layers += 1
    for key, value in config.to_dict().items():
        if key.endswith("layer_types") and isinstance(value, list):
            setattr(config, key, [*value, value[-1]])


def rounded(tensor: torch.Tensor, weight_type: FloatType) -> torch.Tensor:
    """A matrix as a bundle of that type holds it, a vector as it is; fp32."""
    dtype = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[weight_type]
    return tensor.to(dtype).float() if tensor.ndim > 1 else tensor


def _round(model: Any, weight_type: FloatType) -> None:  # noqa: ANN401
    """Round what a bundle rounds, so that what is left to compare is the export."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not is_router(name):
                parameter.copy_(rounded(parameter, weight_type))


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
