"""Loss, vocabulary, batches and the measured acceptance, each against a plain way to get it."""

from collections import Counter
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch

from specexport.engines.ort import OrtFunction
from specexport.export.build import BuildOptions, build
from specexport.export.methods import HeadMethod
from specexport.training.batches import batch_order, epoch_batches
from specexport.training.loss import distribution_loss
from specexport.training.samples import Dataset
from specexport.training.vocabulary import choose_vocabulary
from tests.head_runner import HeadRunner
from tests.tiny import VOCAB_SIZE
from tests.tiny_dataset import cycle_target, cycle_texts, random_texts, write_dataset
from tests.training_tools import options, train


def test_the_loss_is_cross_entropy_with_the_whole_distribution() -> None:
    logits, target = torch.randn(2, 5, 11, dtype=torch.float64).unbind()
    probs, ids = target.softmax(-1).topk(11)
    expected = torch.nn.functional.cross_entropy(logits, target.softmax(-1), reduction="none")
    torch.testing.assert_close(distribution_loss(logits, ids, probs), expected)


def test_tokens_that_the_head_cannot_say_are_left_out_of_the_loss() -> None:
    """Even where the id that stands for them, -1, would reach the last token's logit."""
    logits = torch.randn(4, 6, dtype=torch.float64)
    ids = torch.tensor([[0, -1, 3], [-1, -1, -1], [5, 2, -1], [1, 0, 2]])
    probs = torch.rand(4, 3, dtype=torch.float64)
    log_probs = logits.log_softmax(-1)
    expected = [
        -sum(float(probs[row, j] * log_probs[row, i]) for j, i in enumerate(ids[row]) if i >= 0)
        for row in range(4)
    ]
    found = distribution_loss(logits, ids, probs)
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64))


def test_the_vocabulary_holds_the_tokens_that_answers_have_most_often(tmp_path: Path) -> None:
    _, model = cycle_target(tmp_path)
    texts = [[*text, *text[::2]] for text in random_texts((40, 30, 35, 20, 33, 28))]
    dataset = Dataset.open(write_dataset(tmp_path / "data", model, texts, num_shards=1))
    train_texts, held_out = dataset.split("train"), dataset.split("held_out")
    found = choose_vocabulary(
        (dataset[i] for i in train_texts), (dataset[i] for i in held_out), 60, VOCAB_SIZE
    )
    counts = Counter(t for i in train_texts for t in dataset[i].token_ids.tolist()[4:])
    least = min(counts[t] for t in found.token_map)
    assert least >= max(counts[t] for t in range(VOCAB_SIZE) if t not in found.token_map)
    answers = [t for i in held_out for t in dataset[i].token_ids.tolist()[4:]]
    assert found.coverage == pytest.approx(np.isin(answers, found.token_map).mean())
    assert (np.diff(found.token_map) > 0).all()
    assert np.array_equal(np.arange(60) + found.offsets, found.token_map)
    assert np.array_equal(found.draft_ids[found.token_map], np.arange(60))


def test_an_epoch_has_each_text_once_in_batches_that_keep_to_the_budget() -> None:
    lengths = np.random.default_rng(0).integers(1, 40, 50).tolist()
    shards = [list(range(0, 20)), list(range(20, 45)), list(range(45, 50))]
    epoch = list(epoch_batches(shards, lengths, 60, [0, 0]))
    assert sorted(i for batch in epoch for i in batch) == list(range(50))
    assert all(len(b) == 1 or sum(lengths[i] for i in b) <= 60 for b in epoch)
    endless = list(islice(batch_order(shards, lengths, 60, 0), 2 * len(epoch)))
    assert endless[: len(epoch)] == epoch
    assert endless[len(epoch) :] != epoch  # another order
    assert list(islice(batch_order(shards, lengths, 60, 0), 5, 9)) == endless[5:9]


def test_the_measured_acceptance_is_what_greedy_drafts_of_the_built_head_get(
    tmp_path: Path,
) -> None:
    """Here the head reads its own tokens, in training the text's: the same while they are right."""
    checkpoint, model = cycle_target(tmp_path)
    texts = cycle_texts(12, length=14)
    write_dataset(tmp_path / "data", model, texts, num_shards=1)
    report = train(tmp_path, tmp_path / "head", options(steps=14, num_warmup=1))
    assert 0.05 < min(report.acceptance_rates) < max(report.acceptance_rates) < 0.95
    head = BuildOptions(HeadMethod(kind="eagle3"), head=str(tmp_path / "head"))
    spec = build(str(checkpoint), tmp_path / "bundle", head).head
    assert spec is not None
    assert spec.fuse is not None
    assert spec.step is not None
    fuse = OrtFunction(tmp_path / "bundle" / spec.fuse.path)
    token_map = np.load(tmp_path / "bundle" / str(spec.token_map))
    dataset = Dataset.open(tmp_path / "data")
    tried, right = np.zeros(3), np.zeros(3)
    for i in dataset.split("held_out"):
        sample = dataset[i]
        tokens, states = sample.token_ids.tolist(), sample.states[:, :96].numpy()
        for known in range(3, len(tokens) - 1):  # tokens with states; the first 4 are a prompt
            runner = HeadRunner(tmp_path / "bundle" / spec.step.path)
            logits, recycled = runner.run(tokens[1 : known + 1], fuse.run(states[:known]))
            for step, expected in enumerate(tokens[known + 1 : known + 4]):
                drafted = int(token_map[logits[-1].argmax()])
                tried[step] += 1
                right[step] += drafted == expected
                if drafted != expected:
                    break
                logits, recycled = runner.run([drafted], recycled[-1:])
    assert report.num_drafts == tried[0]
    assert report.acceptance_rates == pytest.approx((right / tried).tolist())
    assert report.acceptance_length == pytest.approx(1 + (np.cumprod(right / tried)).sum())
