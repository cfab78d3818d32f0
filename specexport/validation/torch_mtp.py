"""A multi-token-prediction layer in PyTorch: transformers' own decoder layer between its norms."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from specexport.export.checkpoint import open_checkpoint
from specexport.export.families import read_config
from specexport.export.heads.mtp import find_mtp_layer
from specexport.export.heads.plan import RenamedTensors
from specexport.export.manifest import FloatType
from specexport.validation.reference import ExtraLayer, Reference
from specexport.validation.torch_heads import Rows, read_weights
from specexport.validation.torch_layers import causal_mask


class TorchMtp:
    """The MTP layer of a target's checkpoint, loaded as one more layer of the target."""

    def __init__(self, source: str, weight_type: FloatType) -> None:
        """Raises `CheckpointError` where transformers cannot load the layer."""
        checkpoint = open_checkpoint(source)
        self._target = read_config(checkpoint.config)
        layout, number = find_mtp_layer(checkpoint, self._target.num_layers)
        names = layout.names.numbered(number)
        self.layout, self._layout, self._names = layout.name, layout, names
        self.token_map: NDArray[np.int64] | None = None  # it speaks the target's ids
        self._reference = Reference(
            source, weight_type, ExtraLayer(names.block, self._target.num_layers)
        )
        stored = set(checkpoint.names())
        modules = (names.embedding_norm, names.hidden_norm, names.input_proj, names.final_norm)
        wanted = [f"{m}.weight" for m in (*modules, names.embedding, names.lm_head) if m]
        own = {name: name for name in wanted if name in stored}
        self._weights = read_weights(RenamedTensors(checkpoint, own), weight_type)

    def taps(self, token_ids: Sequence[int]) -> torch.Tensor:
        """[T, H]."""
        return self._reference.taps(token_ids, (self._layout.tap(self._target.num_layers),))

    def features(self, taps: torch.Tensor) -> torch.Tensor:
        """Read as they are."""
        return taps

    def run(self, token_ids: Sequence[int], features: torch.Tensor) -> Rows:
        """Row i has token i, features i and position i."""
        names, model = self._names, self._reference.model
        e = self._table(names.embedding, self._reference.embedding)[list(token_ids)]
        e = self._norm(e, names.embedding_norm)
        h = self._norm(features, names.hidden_norm)
        joined = torch.cat((h, e) if self._layout.hidden_first else (e, h), dim=-1)
        x = (joined @ self._weights[f"{names.input_proj}.weight"].T)[None]
        positions = torch.arange(len(token_ids))[None]
        with torch.inference_mode():
            y = model.model.layers[self._target.num_layers](
                x,
                attention_mask=causal_mask(len(token_ids), self._target.sliding_window),
                position_ids=positions,
                position_embeddings=model.model.rotary_emb(x, positions),
            )
        y = (y[0] if isinstance(y, tuple) else y)[0]
        normed = self._norm(y, names.final_norm) if names.final_norm else self._target_norm(y)
        output = self._table(names.lm_head, self._reference.output_matrix)
        logits = torch.nn.functional.linear(normed, output, model.get_output_embeddings().bias)
        return logits, normed if self._layout.reads_normed else y

    def _table(self, module: str | None, otherwise: torch.Tensor) -> torch.Tensor:
        return otherwise if module is None else self._weights.get(f"{module}.weight", otherwise)

    def _norm(self, x: torch.Tensor, module: str) -> torch.Tensor:
        weight, eps = self._weights[f"{module}.weight"], self._target.norm_eps
        return torch.nn.functional.rms_norm(x, x.shape[-1:], weight, eps)

    def _target_norm(self, x: torch.Tensor) -> torch.Tensor:
        with torch.inference_mode():
            found: torch.Tensor = self._reference.model.model.norm(x)
        return found
