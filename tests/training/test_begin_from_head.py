"""A head that was written is begun from: it starts with what it knew."""

from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

from specexport.cli import cli
from specexport.export.heads.taps import default_taps
from specexport.training.head_start import HeadStart
from specexport.training.lender import read_lender
from specexport.training.methods import METHODS
from specexport.training.vocabulary import DraftVocabulary
from tests.tiny import VOCAB_SIZE
from tests.tiny_dataset import cycle_target, cycle_texts, random_target, write_dataset
from tests.training_tools import Killed, kill_after, options, train

METHOD_OPTIONS: list[dict[str, Any]] = [
    {"method": "eagle3"},
    {"method": "mtp"},
    {"method": "medusa", "tied_lm_head": False},
    {"method": "medusa"},
]


@pytest.fixture(scope="module")
def cycle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cycle")
    _, model = cycle_target(folder)
    write_dataset(folder / "data", model, cycle_texts(40))
    return folder


@pytest.mark.parametrize("given", METHOD_OPTIONS, ids=str)
def test_a_training_of_no_consequence_writes_the_head_that_was_given(
    given: dict[str, Any], cycle: Path, tmp_path: Path
) -> None:
    """With the same vocabulary every tensor is taken; a tied output matrix is the target's."""
    train(cycle, tmp_path / "first", options(steps=1, **given))
    path = tmp_path / "first" / "model.safetensors"
    tensors = load_file(path)
    for name, tensor in tensors.items():
        is_targets = given == {"method": "medusa"} and name.startswith("lm_head")
        if tensor.is_floating_point() and not is_targets:
            tensors[name] = tensor + torch.randn_like(tensor)
    save_file(tensors, path)
    chosen = options(steps=1, **{**given, "learning_rate": 1e-12})
    report = train(cycle, tmp_path / "second", chosen, head=path.parent)
    found = load_file(tmp_path / "second" / "model.safetensors")
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        torch.testing.assert_close(found[name], tensor, msg=name)
    assert report.head == str(path.parent)


@pytest.mark.parametrize("method", ["eagle3", "medusa"])
def test_tokens_that_the_head_could_not_say_begin_as_the_target_says_them(
    method: str, tmp_path: Path
) -> None:
    checkpoint, _ = random_target(tmp_path)
    target = read_lender(str(checkpoint))
    taps = METHODS[method].taps((*default_taps(8), "norm"))
    width = len(taps) * target.config.hidden_size

    def drafter(first: int, last: int, scale: float) -> Any:
        vocabulary = DraftVocabulary(torch.arange(first, last).numpy(), VOCAB_SIZE, 0.5)
        start = HeadStart(taps, vocabulary, torch.full((width,), scale), 64, 2, is_tied=False)
        return METHODS[method].make(target, start)

    old, new = drafter(20, 80, 2.0), drafter(50, 130, 0.5)
    with torch.no_grad():
        for parameter in old.parameters():
            parameter.add_(torch.randn_like(parameter))
    new.take(old.files().tensors)
    matrices = [m.lm_head if method == "eagle3" else m.lm_heads[1] for m in (old, new)]
    torch.testing.assert_close(matrices[1].weight[:30], matrices[0].weight[30:])
    torch.testing.assert_close(matrices[1].weight[30:], target.output_matrix[80:130])
    if method == "eagle3":
        states = torch.randn(5, width)
        torch.testing.assert_close(new.features(states), old.features(states))


def refused(cycle: Path, out: Path, head: Path, *given: str) -> str:
    command = ["train", cycle / "target", "--data", cycle / "data", "-o", out, "--steps", 1]
    result = CliRunner().invoke(cli, [str(a) for a in (*command, "--head", head, *given)])
    assert result.exit_code != 0
    assert not (out / "model.safetensors").exists()
    return " ".join(result.output.split())


def test_a_head_that_cannot_be_begun_from(cycle: Path, tmp_path: Path) -> None:
    head, out = tmp_path / "head", tmp_path / "out"
    train(cycle, head, options(steps=1, num_draft_steps=2))
    assert "does not exist" in refused(cycle, out, tmp_path / "none")
    assert "is no folder of a head" in refused(cycle, out, cycle / "target" / "..")
    assert "The head to begin from has" in refused(cycle, out, head, "--method", "medusa")
    (head / "model.safetensors").write_bytes(b"no tensors")
    assert "is no folder of a head" in refused(cycle, out, head)


def test_a_training_goes_on_only_from_the_head_that_it_began_with(
    cycle: Path, tmp_path: Path
) -> None:
    for name, seed in (("a", 1), ("b", 2)):
        train(cycle, tmp_path / name, options(steps=2, seed=seed))
    with pytest.raises(Killed):
        train(cycle, tmp_path / "c", options(steps=4), head=tmp_path / "a", watch=kill_after(3))
    assert "was begun with" in refused(cycle, tmp_path / "c", tmp_path / "b", "--resume")
    report = train(cycle, tmp_path / "c", options(steps=4), head=tmp_path / "a", resume=True)
    assert report.num_steps == 4
