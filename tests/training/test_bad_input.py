"""What cannot be trained is refused with what came and what to do, before anything is written."""

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from specexport.cli import cli
from specexport.training.progress import STATE_NAME
from tests.tiny import make_model, write_checkpoint
from tests.tiny_dataset import cycle_target, cycle_texts, write_dataset
from tests.training_tools import Killed, kill_after, options, train


@pytest.fixture(scope="module")
def cycle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cycle")
    _, model = cycle_target(folder)
    write_dataset(folder / "data", model, cycle_texts(8, length=8))
    write_dataset(folder / "final", model, cycle_texts(8, length=8), taps=("norm",))
    write_dataset(folder / "layers", model, cycle_texts(8, length=8), taps=(1, 3, 4))
    write_dataset(folder / "short", model, cycle_texts(3, length=8))  # all held out
    return folder


def refused(cycle: Path, out: Path, *given: Any, data: str = "data", target: str = "target") -> str:
    arguments = ["train", cycle / target, "--data", cycle / data, "-o", out, "--steps", 1, *given]
    result = CliRunner().invoke(cli, [str(argument) for argument in arguments])
    assert result.exit_code == 1, result.output
    assert not (out / "model.safetensors").exists()
    return result.output.replace("\n", " ")


def test_a_target_that_the_data_is_not_of(cycle: Path, tmp_path: Path) -> None:
    write_checkpoint(cycle / "wide", "llama", hidden_size=48)
    found = refused(cycle, tmp_path / "head", target="wide")
    assert "was made for another target" in found


def test_data_without_the_states_that_a_method_reads(cycle: Path, tmp_path: Path) -> None:
    found = refused(cycle, tmp_path / "head", data="final")
    assert "holds no states between layers" in found
    for method in ("medusa", "mtp"):
        found = refused(cycle, tmp_path / "head", "--method", method, data="layers")
        assert "lacks the states after the final norm" in found


def test_data_without_texts_to_train_on(cycle: Path, tmp_path: Path) -> None:
    assert "has no train texts" in refused(cycle, tmp_path / "head", data="short")


def test_a_folder_that_is_no_data_set(cycle: Path, tmp_path: Path) -> None:
    assert "holds no dataset.json" in refused(cycle, tmp_path / "head", data="target")


def test_a_folder_that_holds_something_else(cycle: Path, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    assert "is not empty" in refused(cycle, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
    assert "is a file" in refused(cycle, tmp_path / "notes.txt")
    assert "does not exist" in refused(cycle, tmp_path / "no" / "head")


def test_a_damaged_state(cycle: Path, tmp_path: Path) -> None:
    (tmp_path / STATE_NAME).write_bytes(b"no state")
    assert "is damaged" in refused(cycle, tmp_path, "--resume")


def test_options_that_contradict_each_other(cycle: Path, tmp_path: Path) -> None:
    assert "Give one of --steps" in refused(cycle, tmp_path / "head", "--minutes", 1)
    assert "no meaning for method eagle3" in refused(cycle, tmp_path / "head", "--lm-head", "own")


def test_a_training_goes_on_only_as_it_was_begun(cycle: Path, tmp_path: Path) -> None:
    with pytest.raises(Killed):
        train(cycle, tmp_path / "head", options(steps=4), watch=kill_after(3))
    found = refused(cycle, tmp_path / "head", "--resume", "--seed", "7")
    assert "was begun with" in found


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe"])
def test_mtp_layers_of_kinds_that_are_not_trained(family: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "target", family)
    texts = cycle_texts(8, length=8)
    write_dataset(tmp_path / "data", make_model(family), texts, taps=("norm",))
    found = refused(tmp_path, tmp_path / "head", "--method", "mtp")
    assert "which is not trained yet" in found
