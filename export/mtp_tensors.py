"""Which tensors of a target's checkpoint belong to its multi-token-prediction module."""

import re
from collections.abc import Iterable

# Qwen3-Next and Nemotron-H; MiMo; Ernie-4.5.
_PREFIX = re.compile(r"mtp\.|model\.mtp_(layers|block|emb_norm|hidden_norm|linear_proj)\.")
_LAYER = re.compile(r"(model\.layers\.([0-9]{1,9})\.)")


def mtp_tensors(names: Iterable[str], num_layers: int) -> set[str]:
    """The module's tensors among `names`, in any family's naming.

    DeepSeek-V3 and GLM-4.5 append the module as further layers, past the `num_layers` of the
    target; `eh_proj`, which joins embedding and hidden state, tells it from a stray layer.
    """
    names = list(names)
    appended = {name.removesuffix("eh_proj.weight") for name in names if _is_joint(name)}
    return {name for name in names if _PREFIX.match(name) or _layer(name, num_layers) in appended}


def _is_joint(name: str) -> bool:
    return _LAYER.match(name) is not None and name.endswith(".eh_proj.weight")


def _layer(name: str, num_layers: int) -> str | None:
    """The prefix of a layer past the target's own."""
    match = _LAYER.match(name)
    return match[1] if match is not None and int(match[2]) >= num_layers else None
