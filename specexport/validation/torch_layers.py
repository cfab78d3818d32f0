"""The decoder layers of EAGLE heads in PyTorch, with transformers' attention modules."""

from collections.abc import Callable
from typing import Any

import torch

Weights = dict[str, torch.Tensor]
Settings = dict[str, Any]


def _llama(settings: Settings) -> tuple[Any, Any]:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaAttention

    return LlamaConfig(**settings), LlamaAttention


def _qwen3(settings: Settings) -> tuple[Any, Any]:
    from transformers import Qwen3Config
    from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention

    if settings.get("head_dim") is None:  # Qwen3's own default is another
        head_dim = settings["hidden_size"] // settings["num_attention_heads"]
        settings = {**settings, "head_dim": head_dim}
    return Qwen3Config(**settings), Qwen3Attention


def _deepseek(settings: Settings) -> tuple[Any, Any]:
    """Latent attention, whose key-value heads and sizes do not follow Llama's settings."""
    from transformers import DeepseekV3Config
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention

    given = {k: v for k, v in settings.items() if v is not None or k == "q_lora_rank"}
    given.pop("head_dim", None)
    given["num_key_value_heads"] = given["num_attention_heads"]
    return DeepseekV3Config(**given), DeepseekV3Attention


_KINDS: dict[str, Callable[[Settings], tuple[Any, Any]]] = {
    "q_norm": _qwen3,
    "kv_a_proj_with_mqa": _deepseek,
}
"""By a module that only such an attention has: transformers' config and class. Else `_llama`."""


class EagleLayers:
    """The layers of one head."""

    def __init__(self, weights: Weights, values: Any) -> None:  # noqa: ANN401 - a parsed config.json
        """`values` is the config.json of the layers."""
        from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

        known = {key: v for key, v in values.items() if key not in ("architectures", "model_type")}
        marks = (mark for mark in _KINDS if f"layers.0.self_attn.{mark}.weight" in weights)
        self._config, attention_class = _KINDS.get(next(marks, ""), _llama)(known)
        self._config._attn_implementation = "eager"
        self._weights = weights
        self._rotary = LlamaRotaryEmbedding(self._config)
        self._attentions = [
            self._attention(attention_class(self._config, layer_idx=0), f"layers.{i}.self_attn")
            for i in range(self._config.num_hidden_layers)
        ]

    def run(self, residual: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """`residual` [T, H]; `attended` [T, width] is what the first layer's attention reads."""
        x, n = residual, len(residual)
        positions = torch.arange(n)[None]
        embeddings = self._rotary(attended[None], positions)
        mask = causal_mask(n, self._window)
        for i, attention in enumerate(self._attentions):
            if i > 0:
                attended = self.norm(x, f"layers.{i}.input_layernorm.weight")
            with torch.inference_mode():
                (y, *_) = attention(
                    attended[None], position_embeddings=embeddings, attention_mask=mask
                )
            x = x + y[0]
            normed = self.norm(x, f"layers.{i}.post_attention_layernorm.weight")
            x = x + self._mlp(normed, f"layers.{i}.mlp")
        return x

    def norm(self, x: torch.Tensor, weight: str) -> torch.Tensor:
        """RMSNorm over the last axis."""
        eps = self._config.rms_norm_eps
        return torch.nn.functional.rms_norm(x, x.shape[-1:], self._weights[weight], eps)

    @property
    def _window(self) -> int | None:
        kinds = getattr(self._config, "layer_types", None) or []
        return self._config.sliding_window if "sliding_attention" in kinds else None

    def _attention(self, module: Any, name: str) -> Any:  # noqa: ANN401 - transformers' classes
        """The module with the head's weights, as wide as these."""
        for kind, part in list(module.named_children()):
            if isinstance(part, torch.nn.Linear):
                setattr(module, kind, self._linear(f"{name}.{kind}"))
            else:
                part.weight.data = self._weights[f"{name}.{kind}.weight"]
        return module.eval()

    def _linear(self, name: str) -> torch.nn.Linear:
        weight, bias = self._weights[f"{name}.weight"], self._weights.get(f"{name}.bias")
        module = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None)
        module.weight.data = weight
        if bias is not None:
            module.bias.data = bias
        return module

    def _mlp(self, x: torch.Tensor, name: str) -> torch.Tensor:
        def linear(kind: str, x: torch.Tensor) -> torch.Tensor:
            weight = self._weights[f"{name}.{kind}_proj.weight"]
            bias = self._weights.get(f"{name}.{kind}_proj.bias")
            return torch.nn.functional.linear(x, weight, bias)

        return linear("down", torch.nn.functional.silu(linear("gate", x)) * linear("up", x))


def causal_mask(length: int, window: int | None) -> torch.Tensor:  # [1, 1, T, T]
    """0 where a row may look, else minus infinity."""
    rows, keys = torch.arange(length)[:, None], torch.arange(length)
    hidden = keys > rows
    if window is not None:
        hidden |= keys <= rows - window
    return torch.zeros(length, length).masked_fill(hidden, -torch.inf)[None, None]
