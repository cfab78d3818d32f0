"""What a head computes in training is what its exported graphs compute when they draft.

A mask or an alignment that differs would cost acceptance without a sign.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from specexport.engines.ort import OrtFunction
from specexport.export.build import BuildOptions, build
from specexport.export.manifest import HeadSpec
from specexport.export.methods import HeadMethod, MedusaMethod
from specexport.training.drafter import Drafter
from specexport.training.head_start import HeadStart
from specexport.training.lender import read_lender
from specexport.training.methods import METHODS
from specexport.training.packing import Packed, pack
from specexport.training.samples import Dataset
from specexport.training.vocabulary import DraftVocabulary
from tests.head_runner import HeadRunner
from tests.tiny import VOCAB_SIZE
from tests.tiny_dataset import random_target, random_texts, write_dataset

NUM_STEPS, NUM_PROMPT = 4, 5
TOLERANCE = 1e-4  # fp32 sums in another order


def vocabulary(size: int) -> DraftVocabulary:
    ids = np.random.default_rng(1).permutation(VOCAB_SIZE)[:size]
    return DraftVocabulary(np.sort(ids), VOCAB_SIZE, 0.5)


def untaught(
    method: str,
    checkpoint: Path,
    dataset: Dataset,
    size: int,
    *,
    is_tied: bool = True,
    is_random: bool = True,
) -> Drafter:
    """A head, with random weights large enough for every part of it to show."""
    taps = METHODS[method].taps(dataset.spec.taps)
    width = len(taps) * dataset.spec.hidden_size
    scale = torch.rand(width, generator=torch.Generator().manual_seed(2)) + 0.5
    torch.manual_seed(3)
    target = read_lender(str(checkpoint))
    start = HeadStart(taps, vocabulary(size), scale, 64, NUM_STEPS, is_tied)
    drafter = METHODS[method].make(target, start)
    with torch.no_grad():
        for parameter in drafter.parameters():
            if parameter.requires_grad and is_random:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    return drafter


def three_texts(folder: Path) -> tuple[Path, Dataset]:
    """A random target, and texts of different lengths."""
    checkpoint, model = random_target(folder)
    texts = random_texts((14, 9, 17))
    data = write_dataset(folder / "data", model, texts, num_prompt=NUM_PROMPT, num_shards=1)
    return checkpoint, Dataset.open(data)


def packed(dataset: Dataset, method: str) -> tuple[Packed, list[int]]:
    """Three texts of different lengths in one batch."""
    columns = dataset.spec.columns(METHODS[method].taps(dataset.spec.taps))
    texts = [0, 1, 2]
    return pack([dataset[i] for i in texts], columns, NUM_STEPS), texts


def drafted(bundle: Path, spec: HeadSpec, states: torch.Tensor, tokens: list[int]) -> Any:
    """Logits [K, V_draft] of a draft that reads the text: a prefix and then step by step."""
    assert spec.step is not None
    fuse = OrtFunction(bundle / spec.fuse.path) if spec.fuse else None
    features = fuse.run(states.numpy()) if fuse else states.numpy()
    runner = HeadRunner(bundle / spec.step.path)
    known = len(states)
    logits, recycled = runner.run(tokens[1 : known + 1], features)
    found = [logits[-1]]
    for step in range(1, NUM_STEPS):
        token = tokens[min(known + step, len(tokens) - 1)]  # past the text: any
        logits, recycled = runner.run([token], recycled[-1:])
        found.append(logits[-1])
    return np.stack(found)


@pytest.mark.parametrize("size", [90, VOCAB_SIZE])
@pytest.mark.parametrize("method", ["eagle3", "mtp"])
def test_unrolled_steps_are_what_the_exported_head_drafts(
    method: str, size: int, tmp_path: Path
) -> None:
    checkpoint, dataset = three_texts(tmp_path)
    drafter = untaught(method, checkpoint, dataset, size)
    (tmp_path / "head").mkdir()
    drafter.files().write(tmp_path / "head", "fp32")
    options = BuildOptions(HeadMethod.model_validate({"kind": method}), head=str(tmp_path / "head"))
    manifest = build(str(checkpoint), tmp_path / "bundle", options)
    assert manifest.head is not None
    batch, numbers = packed(dataset, method)
    with torch.inference_mode():
        unrolled = torch.stack(list(drafter(batch)))  # [K, C, V_draft]
    for (rows, chains), number in zip(batch.spans, numbers, strict=True):
        tokens = dataset[number].token_ids.tolist()
        states = batch.states[rows]
        assert chains.stop - chains.start == len(tokens) - NUM_PROMPT  # one for each answer token
        for chain in range(chains.start, chains.stop):
            known = NUM_PROMPT - 1 + chain - chains.start  # tokens with states that it begins from
            expected = drafted(tmp_path / "bundle", manifest.head, states[:known], tokens)
            steps = min(NUM_STEPS, len(tokens) - known - 1)
            assert batch.counts[:, chain].sum() == steps
            found = unrolled[:, chain].numpy()
            if method == "mtp":  # it says all tokens, and is trained on some
                expected = expected[:, vocabulary(size).token_map]
            np.testing.assert_allclose(found[:steps], expected[:steps], atol=TOLERANCE)


@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize("size", [90, VOCAB_SIZE])
def test_medusa_heads_are_what_the_exported_graph_computes(
    size: int, is_tied: bool, tmp_path: Path
) -> None:
    checkpoint, dataset = three_texts(tmp_path)
    drafter = untaught("medusa", checkpoint, dataset, size, is_tied=is_tied)
    (tmp_path / "head").mkdir()
    drafter.files().write(tmp_path / "head", "fp32")
    options = BuildOptions(MedusaMethod(num_speculative_tokens=2), head=str(tmp_path / "head"))
    manifest = build(str(checkpoint), tmp_path / "bundle", options)
    assert manifest.head is not None
    assert manifest.head.medusa is not None
    batch, numbers = packed(dataset, "medusa")
    with torch.inference_mode():
        found = torch.stack(list(drafter(batch)), dim=1).numpy()  # [C, K, V_draft]
    states = [dataset[i].states[NUM_PROMPT - 2 : -2, -32:] for i in numbers]
    graph = OrtFunction(tmp_path / "bundle" / manifest.head.medusa.path)
    expected = graph.run(torch.cat(states).numpy())
    np.testing.assert_allclose(found, expected, atol=TOLERANCE)
    if size < VOCAB_SIZE:
        token_map = np.load(tmp_path / "bundle" / str(manifest.head.token_map))
        assert np.array_equal(token_map, vocabulary(size).token_map)
