"""Medusa heads to train (arXiv 2401.10774), and the files that publish them.

Head d predicts from the state after token i, behind the target's final norm, the token i + d + 2:
`x + silu(W x + b)`, then an output matrix. Two ways: all heads share the target's output matrix,
frozen (`tied`), or each trains one of its own. Names and config are those of vLLM's layout, the one
with a reduced vocabulary; `export/heads/medusa.py` has all layouts.
"""

from collections.abc import Iterator, Mapping

import torch
from torch import nn

from specexport.training.drafter import Drafter
from specexport.training.head_files import HeadFiles
from specexport.training.head_start import HeadStart
from specexport.training.lender import Lender
from specexport.training.packing import Packed


class Medusa(Drafter):
    """One residual block a head; at first each head says what the target's own head says."""

    def __init__(self, target: Lender, start: HeadStart) -> None:
        super().__init__()
        self._start, self._target = start, target.config
        size, num_heads = target.config.hidden_size, start.num_draft_steps
        self.blocks = nn.ModuleList(MedusaBlock(size) for _ in range(num_heads))
        rows = target.output_matrix[torch.from_numpy(start.vocabulary.token_map)]
        self.lm_heads = nn.ModuleList(
            nn.Linear(size, len(rows), bias=False) for _ in range(1 if start.is_tied else num_heads)
        )
        for lm_head in self.lm_heads:
            lm_head.weight.data = rows.clone()
            lm_head.weight.requires_grad = not start.is_tied

    def forward(self, batch: Packed) -> Iterator[torch.Tensor]:
        """Logits [C, V_draft] of each head."""
        states = batch.states[batch.first_rows]
        for d, block in enumerate(self.blocks):
            yield self.lm_heads[d % len(self.lm_heads)](block(states))

    def take(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Tokens that it could not say begin as the target says them."""
        taken, vocabulary = dict(tensors), self._start.vocabulary
        own = self.state_dict()
        for d in range(len(self.lm_heads)):
            name = f"lm_heads.{d}.weight"
            if self._start.is_tied:
                taken[name] = own[name]
            elif name in taken:
                rows = taken[name].float()
                token_ids = tensors.get("token_map", torch.arange(len(rows)))
                taken[name] = vocabulary.rows(rows, token_ids, own[name])
        super().take(taken)

    def files(self) -> HeadFiles:
        """Without an output matrix where it is the target's, row for row."""
        tensors, vocabulary = dict(self.state_dict()), self._start.vocabulary
        if not vocabulary.is_whole:
            tensors["token_map"] = torch.from_numpy(vocabulary.token_map)
        elif self._start.is_tied:
            del tensors["lm_heads.0.weight"]
        config = {
            "architectures": ["MedusaModel"],
            "model_type": "medusa",
            "hidden_size": self._target.hidden_size,
            "vocab_size": self._target.vocab_size,
            "truncated_vocab_size": len(vocabulary),
            "num_heads": len(self.blocks),
            "num_hidden_layers": 1,
            "medusa_num_heads": len(self.blocks),
            "medusa_num_layers": 1,
            "medusa_fc_bias": True,
            "original_lm_head": self._start.is_tied,
        }
        return HeadFiles(tensors, config)


class MedusaBlock(nn.Module):
    """`x + silu(W x + b)`, at first x."""

    def __init__(self, size: int) -> None:
        super().__init__()
        linear = nn.Linear(size, size)
        nn.init.zeros_(linear.weight)
        nn.init.zeros_(linear.bias)
        self.layers = nn.ModuleList([linear])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[C, H] → [C, H]."""
        return x + nn.functional.silu(self.layers[0](x))
