"""The loop: steps of AdamW, looks at held-out texts, saved states.

All that is random is a function of the seed and the step, so a state needs no generators, and a
training that goes on from one gives what it would have given.
"""

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from specexport.training.drafter import Drafter
from specexport.training.evaluate import Acceptance, measure_acceptance
from specexport.training.loss import Learner
from specexport.training.options import Precision, TrainOptions
from specexport.training.packing import Packed
from specexport.training.progress import Progress, SavedState
from specexport.training.training_data import TrainingData

_PACE_STEPS = 5
"""After so many a time budget is first made a number of steps; part of the warm-up."""

Watch = Callable[[Progress], None]
"""Told after every step and look."""


class Trainer:
    """One head, one data set. `accelerate` places it on the devices there are.

    With several processes each takes every n-th batch; all of them look at the same texts.
    """

    def __init__(
        self,
        drafter: Drafter,
        draft_ids: torch.Tensor,
        data: TrainingData,
        precision: Precision = "fp32",
    ) -> None:
        """`draft_ids` [V] are -1 for tokens that the head cannot say."""
        self._accelerator, self._precision = Accelerator(mixed_precision="no"), precision
        trained = [parameter for parameter in drafter.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(trained, betas=(0.9, 0.95), fused=True)
        learner = Learner(drafter, draft_ids)
        self._learner, self._optimizer = self._accelerator.prepare(learner, optimizer)
        self.drafter, self._draft_ids, self._data = drafter, learner.draft_ids, data
        self.progress = Progress()
        self._best_weights = self._weights()

    @property
    def is_main_process(self) -> bool:
        """True in the one process that writes files."""
        return bool(self._accelerator.is_main_process)

    def restore(self, state: SavedState) -> None:
        """Go on from a saved state."""
        self.progress = state.progress
        self._best_weights = state.best_weights
        self.drafter.load_state_dict(state.weights)
        self._optimizer.load_state_dict(state.optimizer)

    def save(self, folder: Path, run: dict[str, Any]) -> None:
        """Write the state; with several processes one does."""
        if self.is_main_process:
            state = SavedState(
                run=run,
                progress=self.progress,
                weights=self._weights(),
                best_weights=self._best_weights,
                optimizer=self._optimizer.state_dict(),
            )
            state.write(folder)

    def run(self, options: TrainOptions, save: Callable[[], None], watch: Watch) -> None:
        """To the end, early or not; the head is then the best one that was looked at."""
        progress = self.progress
        if progress.total_steps is None:
            progress.total_steps = options.known_steps(self._data.num_train_batches(options.seed))
        processes, first = self._accelerator.num_processes, self._accelerator.process_index
        first += progress.step * processes
        batches = self._data.train(options.seed, first, processes)
        if not progress.points:
            self._look(options)
            watch(progress)
        while not progress.is_over(options.patience):
            self._step(next(batches), options)
            if progress.is_look_due(options.num_looks):
                self._look(options)
            if progress.step == _PACE_STEPS or progress.loss_count == 0:
                self._fit(options)
            if progress.step % options.save_every == 0:
                save()
            watch(progress)
        self.drafter.load_state_dict(self._best_weights)

    def final_acceptance(self) -> Acceptance:
        """On all held-out texts."""
        return self._measure(math.inf)

    def _step(self, batch: Packed, options: TrainOptions) -> None:
        started = time.perf_counter()
        rate = options.learning_rate_at(self.progress.step, self.progress.total_steps)
        for group in self._optimizer.param_groups:
            group["lr"], group["weight_decay"] = rate, options.weight_decay
        with self._autocast():
            loss = self._learner(batch.to(self._accelerator.device))
        self._optimizer.zero_grad()
        self._accelerator.backward(loss)
        self._accelerator.clip_grad_norm_(self._learner.parameters(), options.max_grad_norm)
        self._optimizer.step()
        self.progress.step += 1
        self.progress.loss_sum += float(loss.detach())
        self.progress.loss_count += 1
        self.progress.num_tokens += len(batch.first_rows) * self._accelerator.num_processes
        self.progress.elapsed_s += time.perf_counter() - started

    def _look(self, options: TrainOptions) -> None:
        """Measure, and keep the weights if they are the best."""
        started, progress = time.perf_counter(), self.progress
        found = self._measure(options.look_tokens)
        progress.elapsed_s += time.perf_counter() - started
        progress.add(found)
        if progress.num_worse == 0:
            self._best_weights = self._weights()

    def _measure(self, num_tokens: float) -> Acceptance:
        batches = (batch.to(self._accelerator.device) for batch in self._data.held_out(num_tokens))
        with self._autocast():
            return measure_acceptance(self.drafter, self._draft_ids, batches)

    def _autocast(self) -> torch.autocast:
        """Of our own, since accelerate holds one precision for the whole process."""
        device, enabled = self._accelerator.device.type, self._precision == "bf16"
        return torch.autocast(device, dtype=torch.bfloat16, enabled=enabled)

    def _fit(self, options: TrainOptions) -> None:
        """The steps that the time allows, by what they took; the slowest process decides."""
        progress = self.progress
        if options.minutes is None or progress.step == progress.total_steps:
            return
        elapsed = torch.tensor([progress.elapsed_s], device=self._accelerator.device)
        step_s = float(self._accelerator.gather(elapsed).max()) / progress.step
        progress.total_steps = max(progress.step + 1, int(60 * options.minutes / step_s))

    def _weights(self) -> dict[str, torch.Tensor]:
        return {name: tensor.detach().clone() for name, tensor in self.drafter.state_dict().items()}
