"""Medusa heads in every layout, and the paper's equation in plain torch."""

from typing import Any

import torch

from tests.heads_tiny import HIDDEN, Random, Tensors
from tests.tiny import VOCAB_SIZE

NUM_HEADS, NUM_BLOCKS = 3, 2


def weights(*, bias: bool = True, vocab_size: int = VOCAB_SIZE) -> list[Tensors]:
    """By head: W0, b0, W1, b1, …, out."""
    random = Random()
    heads = []
    for _ in range(NUM_HEADS):
        head = {f"W{j}": random.matrix(HIDDEN, HIDDEN) for j in range(NUM_BLOCKS)}
        if bias:
            head |= {f"b{j}": random.matrix(HIDDEN) for j in range(NUM_BLOCKS)}
        heads.append({**head, "out": random.matrix(vocab_size, HIDDEN)})
    return heads


def spell(heads: list[Tensors], block: str, output: str) -> Tensors:
    """The tensors by a layout's names; `block` and `output` hold {i} and {j}."""
    found = {}
    for i, head in enumerate(heads):
        for j in range(NUM_BLOCKS):
            found[block.format(i=i, j=j) + ".weight"] = head[f"W{j}"]
            if f"b{j}" in head:
                found[block.format(i=i, j=j) + ".bias"] = head[f"b{j}"]
        found[output.format(i=i, j=NUM_BLOCKS)] = head["out"]
    return found


def classic(heads: list[Tensors], prefix: str = "") -> Tensors:
    return spell(heads, prefix + "{i}.{j}.linear", prefix + "{i}.{j}.weight")


def vllm(heads: list[Tensors]) -> Tensors:
    return spell(heads, "blocks.{i}.layers.{j}", "lm_heads.{i}.weight")


def reference(heads: list[Tensors], hidden: torch.Tensor) -> Any:
    """`x + silu(W x + b)` in each block, then the output matrix: [B, H] -> [B, heads, V]."""
    logits = []
    for head in heads:
        x = hidden.double()
        for j in range(NUM_BLOCKS):
            y = x @ head[f"W{j}"].double().T + head.get(f"b{j}", torch.zeros(HIDDEN)).double()
            x = x + torch.nn.functional.silu(y)
        logits.append(x @ head["out"].double().T)
    return torch.stack(logits, dim=1).numpy()
