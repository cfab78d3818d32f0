"""How a head is trained."""

import math
from typing import Literal

from pydantic import BaseModel, ConfigDict

Precision = Literal["fp32", "bf16"]


class TrainOptions(BaseModel):
    """Everything that changes the result, but for target and data."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    method: str
    num_draft_steps: int = 4
    """Draft positions that are learned, each from the one before it."""
    draft_vocab_size: int | None = None
    """None: the target's."""
    tied_lm_head: bool = True
    """Medusa: all heads share the target's output matrix, instead of training one each."""
    steps: int | None = None
    epochs: float | None = None
    minutes: float | None = None
    """One of the three says how long."""
    batch_tokens: int = 2048
    long_share: float = 0.4
    """Of a batch's texts: drafts of these are unrolled to the end, others by one step, which costs
    a quarter; each step weighs the same for it."""
    precision: Precision = "fp32"
    """Of products of matrices; weights, sums and the optimizer stay in fp32."""
    learning_rate: float = 3e-4
    num_warmup: int = 20
    weight_decay: float = 0.01
    max_grad_norm: float = 1.0
    num_looks: int = 10
    """How often held-out texts are looked at."""
    patience: int = 4
    """Looks without a gain before it ends early."""
    look_tokens: int = 16384
    """Held-out tokens of a look; the last one takes all."""
    save_every: int = 50
    """Steps between two saved states."""
    seed: int = 0

    def known_steps(self, num_epoch_batches: int) -> int | None:
        """How many steps there will be; None where the time decides."""
        if self.epochs is not None:
            return math.ceil(self.epochs * num_epoch_batches)
        return self.steps

    def learning_rate_at(self, step: int, total_steps: int | None) -> float:
        """A straight rise, then half a cosine down to a tenth; up to then the end is not needed."""
        rise = min(1.0, (step + 1) / self.num_warmup)
        done = max(0, step - self.num_warmup) / max((total_steps or step) - self.num_warmup, 1)
        return self.learning_rate * rise * (0.55 + 0.45 * math.cos(math.pi * min(done, 1.0)))
