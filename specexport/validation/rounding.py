"""PyTorch's matrices rounded as a bundle stores them: what is left to compare is the export.

Written in PyTorch from the definition of the form, not with the code that exports it.
"""

from typing import Any

import torch

from specexport.export.manifest import GraphSpec, WeightType
from specexport.export.moe import is_router
from specexport.validation.reference import Reference

_BLOCK = 32
_FLOATS = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
# Latent attention's up-projections are cut into a matrix a head, and those stay as they are.
_KEPT = ".kv_b_proj.weight"


def rounded_reference(source: str, spec: GraphSpec) -> Reference:
    """The checkpoint in PyTorch with its matrices as the graph of `spec` stores them."""
    reference = Reference(source)
    with torch.no_grad():
        _round_model(reference.model, spec)
    return reference


def _round_model(model: Any, spec: GraphSpec) -> None:  # noqa: ANN401 - transformers' classes
    embedding, output = model.get_input_embeddings(), model.get_output_embeddings()
    tables = {id(embedding.weight), id(output.weight)}
    for name, parameter in model.named_parameters():
        if id(parameter) not in tables and not is_router(name):
            is_kept = name.endswith(_KEPT) and spec.weight_type not in _FLOATS
            parameter.copy_(parameter if is_kept else round_matrix(parameter, spec.weight_type))
    embedding_type = spec.embedding_type or spec.weight_type
    lm_head_type = spec.lm_head_type or spec.weight_type
    if len(tables) == 1 and lm_head_type != embedding_type:  # tied, but stored in two types
        output.weight = torch.nn.Parameter(output.weight.clone())
    embedding.weight.copy_(round_matrix(embedding.weight, embedding_type))
    if output.weight is not embedding.weight:
        output.weight.copy_(round_matrix(output.weight, lm_head_type))


def round_matrix(tensor: torch.Tensor, weight_type: WeightType) -> torch.Tensor:
    """A matrix (or several) as `weight_type` holds it, fp32; vectors as they are.

    Integers and fp8 have a scale for each 32 numbers of the last axis; where that does not come out
    even, the matrix is left as it is.
    """
    if tensor.ndim < 2:
        return tensor
    if weight_type in _FLOATS:
        return tensor.to(_FLOATS[weight_type]).float()
    if tensor.shape[-1] % _BLOCK:
        return tensor
    blocks = tensor.float().reshape(*tensor.shape[:-1], -1, _BLOCK)
    if weight_type == "int4":  # the number of the largest magnitude, whatever its sign, is code -8
        least, most = blocks.amin(-1, keepdim=True), blocks.amax(-1, keepdim=True)
        low, high, scale = -8, 7, torch.where(-least > most, least, most) / -8
    else:
        high = {"int8": 127, "fp8": 448}[weight_type]
        low, scale = -high, blocks.abs().amax(-1, keepdim=True) / high
    scale = torch.where(scale == 0, 1.0, scale)
    quotients = (blocks / scale).clamp(low, high)
    codes = quotients.to(torch.float8_e4m3fn).float() if weight_type == "fp8" else quotients.round()
    return (codes * scale).reshape(tensor.shape)
