"""Layers and experts that a config announces are looked for before a graph of them is built."""

from collections.abc import Iterable, Iterator

from specexport.errors import CheckpointError
from specexport.export.checkpoint import TensorSource
from specexport.export.config import DecoderConfig
from specexport.export.decoder import Layer


def require_layers(
    tensors: TensorSource, config: DecoderConfig, layers: Iterable[Layer] | None = None
) -> None:
    """Raise `CheckpointError` naming the first of `layers` (None: all), or expert, that is missing.

    Looks at no more names than the file holds and one, whatever numbers the config has.
    """
    names = set(tensors.names())
    if layers is None:
        layers = (Layer(f"model.layers.{i}", i) for i in range(config.num_layers))
    for name in (name for layer in layers for name in _needed(config, layer)):
        if name not in names:
            experts = f" and {config.moe.num_experts} experts" if config.moe else ""
            raise CheckpointError(
                f"{tensors.source} lacks {name!r}, which its config calls for "
                f"({config.num_layers} layers{experts}). Is the download complete, and config.json "
                "of this model?"
            )


def _needed(config: DecoderConfig, layer: Layer) -> Iterator[str]:
    """A tensor of the layer, and one of each of its experts."""
    yield f"{layer.name}.input_layernorm.weight"
    if config.moe is not None and config.has_experts(layer.index):
        for expert in range(config.moe.num_experts):
            yield f"{layer.name}.mlp.experts.{expert}.gate_proj.weight"
