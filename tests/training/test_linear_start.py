"""Where heads that draft step by step begin."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from specexport.training.eagle3 import Eagle3
from specexport.training.linear_start import Columns, fit_linear, normed
from specexport.training.loss import Learner
from specexport.training.methods import METHODS
from specexport.training.mtp import Mtp
from specexport.training.packing import pack
from specexport.training.samples import Sample
from tests.training.test_chains import NUM_STEPS, three_texts, untaught

W, H = 6, 4


def linear_samples(noise: float) -> tuple[list[Sample], torch.Tensor, torch.Tensor]:
    """Texts whose states are linear in the state before and the token, but for noise."""
    generator = torch.Generator().manual_seed(0)
    matrix = torch.randn(W + 1, H, generator=generator)
    norm = torch.rand(H, generator=generator) + 0.5
    samples = []
    for length in (40, 60, 50):
        ids = torch.randint(9, (length,), generator=generator)
        read = torch.randn(length, W, generator=generator)
        final = torch.zeros(length, H)
        final[1:] = norm * (torch.cat([read[:-1], ids[1:, None]], dim=1) @ matrix)
        final += noise * norm * torch.randn(length, H, generator=generator)
        answer = torch.arange(length) >= 7
        top = torch.zeros(length, 1)
        samples.append(Sample(ids, answer, torch.cat([read, final], dim=1), top.long(), top))
    return samples, matrix, norm


def read(states: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    return torch.cat([states, token_ids[:, None]], dim=1)


COLUMNS = Columns(list(range(W)), list(range(W, W + H)))


def test_a_linear_rule_is_found() -> None:
    samples, matrix, norm = linear_samples(noise=0.0)
    guess = fit_linear(samples, COLUMNS, read, norm)
    torch.testing.assert_close(guess.matrix, matrix, atol=2e-2, rtol=0.0)  # it is damped
    assert guess.fit == pytest.approx(1.0, abs=5e-3)


def test_the_fit_is_the_cosine_where_there_is_noise() -> None:
    samples, _, norm = linear_samples(noise=3.0)
    guess = fit_linear(samples, COLUMNS, read, norm)
    wanted, guessed = [], []
    for sample in samples:
        rows = torch.arange(5, len(sample.token_ids) - 1)  # those before an answer's token but one
        inputs = read(sample.states[rows, :W], sample.token_ids[rows + 1])
        guessed.append(inputs @ guess.matrix)
        wanted.append(sample.states[rows + 1, W:] / norm)
    a, b = torch.cat(guessed).flatten(), torch.cat(wanted).flatten()
    assert guess.fit == pytest.approx(float(a @ b / (a.norm() * b.norm())), abs=1e-2)
    assert 0.3 < guess.fit < 0.95


def test_low_rank_is_the_best_that_can_be_had() -> None:
    """Of all ranks: the whole gives the matrix, and less loses the smallest singular values."""
    samples, _, norm = linear_samples(noise=0.5)
    guess = fit_linear(samples, COLUMNS, read, norm)
    part = slice(0, W)
    into, out_of = guess.low_rank(part, H)
    torch.testing.assert_close((out_of @ into).T, guess.matrix[part], atol=1e-5, rtol=1e-5)
    root = torch.linalg.cholesky(guess.moments[part, part])
    values = torch.linalg.svdvals(root.T @ guess.matrix[part])
    into, out_of = guess.low_rank(part, 2)
    lost = root.T @ (guess.matrix[part] - (out_of @ into).T)
    assert float(lost.norm()) == pytest.approx(float(values[2:].norm()), rel=1e-3)


@pytest.mark.parametrize("method", ["eagle3", "mtp"])
def test_a_new_head_says_about_what_the_guess_says(method: str, tmp_path: Path) -> None:
    checkpoint, dataset = three_texts(tmp_path)
    drafter = untaught(method, checkpoint, dataset, 90, is_random=False)
    assert isinstance(drafter, Eagle3 | Mtp)
    columns = dataset.spec.columns(METHODS[method].taps(dataset.spec.taps))
    final = dataset.spec.columns(("norm",))
    samples = [dataset[i] for i in range(3)]
    norm = torch.ones(len(final))
    guess = fit_linear(samples, Columns(columns, final), drafter.linear_inputs, norm)
    drafter.begin(guess)
    batch = pack(samples, columns, 1)
    with torch.inference_mode():
        (logits,) = drafter(batch)
        inputs = drafter.linear_inputs(batch.states, batch.next_ids)[batch.first_rows]
        guessed = normed(inputs @ guess.matrix, 1e-6)
        lm_head = drafter.lm_head
        expected = guessed @ (lm_head.weight if isinstance(lm_head, nn.Linear) else lm_head).T
    found = torch.cosine_similarity(logits, expected, dim=1)
    assert float(found.median()) > 0.9


def test_drafts_of_texts_that_are_not_long_are_only_begun(tmp_path: Path) -> None:
    checkpoint, dataset = three_texts(tmp_path)
    drafter = untaught("eagle3", checkpoint, dataset, 90)
    columns = dataset.spec.columns(METHODS["eagle3"].taps(dataset.spec.taps))
    samples = [dataset[i] for i in range(3)]
    whole, short = (pack(samples, columns, NUM_STEPS, share) for share in (1.0, 0.4))
    assert (whole.num_long, short.num_long) == (3, 1)
    with torch.inference_mode():
        all_logits, logits = list(drafter(whole)), list(drafter(short))
    num_chains = [len(step) for step in logits]
    assert num_chains == [len(all_logits[0])] + [whole.spans[0][1].stop] * (NUM_STEPS - 1)
    for found, expected in zip(logits, all_logits, strict=True):
        torch.testing.assert_close(found, expected[: len(found)])


def test_the_share_of_long_texts_does_not_change_what_steps_weigh(tmp_path: Path) -> None:
    """Of three equal texts, one unrolled gives the loss of three."""
    checkpoint, dataset = three_texts(tmp_path)
    drafter = untaught("eagle3", checkpoint, dataset, 90)
    columns = dataset.spec.columns(METHODS["eagle3"].taps(dataset.spec.taps))
    learner = Learner(drafter, torch.from_numpy(np.arange(dataset.spec.vocab_size) % 90))
    samples = [dataset[0]] * 3
    with torch.inference_mode():
        whole, short = (learner(pack(samples, columns, NUM_STEPS, s)) for s in (1.0, 0.34))
    torch.testing.assert_close(whole, short)


def test_a_long_text_without_an_answer_teaches_nothing(tmp_path: Path) -> None:
    """Its answer was cut off, and it is the only one that would be unrolled."""
    checkpoint, dataset = three_texts(tmp_path)
    drafter = untaught("eagle3", checkpoint, dataset, 90)
    columns = dataset.spec.columns(METHODS["eagle3"].taps(dataset.spec.taps))
    learner = Learner(drafter, torch.from_numpy(np.arange(dataset.spec.vocab_size) % 90))
    cut = replace(dataset[1], is_answer=torch.zeros_like(dataset[1].is_answer))
    with torch.inference_mode():
        expected = learner(pack([dataset[0]], columns, 1))
        found = learner(pack([cut, dataset[0]], columns, NUM_STEPS, 0.4))
    torch.testing.assert_close(found, expected)
