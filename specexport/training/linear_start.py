"""The best linear guess of the target's next state: where a head begins that drafts step by step.

Least squares over answers. What the head's first step reads, after token i and with token i + 1, is
mapped to the direction of the target's state after token i + 1, behind the final norm and without
that norm's weight. On SmolLM2-135M a head that begins so knows at once what takes hundreds of
steps to learn otherwise.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from specexport.training.samples import Sample

Read = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""A head's linear inputs [N, U] of states [N, W] and token ids [N]."""

_MOST_ROWS = 2**17
_DAMPING = 1e-3
"""Added to the diagonal of the inputs' second moments, in parts of its mean."""


@dataclass(frozen=True, slots=True)
class LinearGuess:
    """U inputs → a state [H] whose root mean square is 1 where it is right."""

    matrix: torch.Tensor  # [U, H]
    moments: torch.Tensor  # [U, U]: second moments of the inputs
    fit: float
    """Root of the share that is explained, 0 to 1: about the cosine of guess and state."""

    def low_rank(self, inputs: slice, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        """[rank, u] and [H, rank], whose product does for `inputs` what the matrix does.

        The directions are those in which what comes out varies most.
        """
        matrix = self.matrix[inputs]
        spread = matrix.T @ self.moments[inputs, inputs] @ matrix  # [H, H]
        directions = torch.linalg.eigh(spread).eigenvectors[:, -rank:]  # rising
        return (matrix @ directions).T, directions


@dataclass(frozen=True, slots=True)
class Columns:
    """Of the states of a data set."""

    read: list[int]
    """What the head reads."""
    final: list[int]
    """The state behind the final norm."""


def fit_linear(
    samples: Iterable[Sample], columns: Columns, read: Read, final_norm: torch.Tensor
) -> LinearGuess:
    """Of as many samples as hold 131,072 answer tokens; `final_norm` [H] is that norm's weight."""
    moments: torch.Tensor | float = 0.0
    products: torch.Tensor | float = 0.0
    size, num_rows = 0.0, 0
    for sample in samples:
        rows = sample.is_answer[2:].nonzero()[:, 0]  # as `packing` has them
        inputs = read(sample.states[rows][:, columns.read], sample.token_ids[rows + 1])
        wanted = sample.states[rows + 1][:, columns.final] / final_norm
        moments = moments + (inputs.T @ inputs).double()
        products = products + (inputs.T @ wanted).double()
        size += float(wanted.square().sum())
        num_rows += len(rows)
        if num_rows >= _MOST_ROWS:
            break
    assert isinstance(moments, torch.Tensor)
    assert isinstance(products, torch.Tensor)
    damping = _DAMPING * moments.diagonal().mean()
    matrix = torch.linalg.solve(moments + damping * torch.eye(len(moments)), products)
    explained = float((matrix * products).sum()) / size
    return LinearGuess(matrix.float(), moments.float() / num_rows, max(explained, 0.0) ** 0.5)


def normed(x: torch.Tensor, eps: float) -> torch.Tensor:
    """Rows of root mean square 1."""
    return torch.nn.functional.rms_norm(x, x.shape[-1:], eps=eps)
