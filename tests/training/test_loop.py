"""Training as a whole, on a target whose next token is known."""

import math
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from specexport.export.checkpoint import open_checkpoint
from specexport.export.families import read_config
from specexport.export.heads.eagle3 import plan_eagle3
from specexport.export.heads.head_checkpoint import open_head
from specexport.training.options import TrainOptions
from specexport.training.progress import STATE_NAME
from specexport.training.report import REPORT_NAME, TrainReport
from tests.tiny import make_model, write_checkpoint
from tests.tiny_dataset import cycle_target, cycle_texts, write_dataset
from tests.training_tools import V_DRAFT, Killed, kill_after, options, train

_DEFAULTS = {
    name: TrainOptions.model_fields[name].default
    for name in ("num_draft_steps", "learning_rate", "num_warmup")
}


@pytest.fixture(scope="module")
def cycle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a target that goes through the vocabulary, and a data set of its texts."""
    folder = tmp_path_factory.mktemp("cycle")
    _, model = cycle_target(folder)
    write_dataset(folder / "data", model, cycle_texts(60))
    return folder


def test_a_head_learns_what_follows_what(cycle: Path, tmp_path: Path) -> None:
    """By chance a draft's token is right once in 200; it is bounded by the vocabulary.

    The linear guess that the head begins from has the first tokens, but none of the later ones.
    """
    report = train(cycle, tmp_path / "head", options(steps=60))
    assert report.points[0].rates[0] > 0.5
    assert max(report.points[0].rates[1:]) < 0.1
    assert report.acceptance_rates[0] > 0.95 * report.vocabulary_coverage
    assert min(report.acceptance_rates[1:]) > 0.8
    assert report.points[-1].held_out_loss < report.points[0].held_out_loss
    assert report == TrainReport.model_validate_json((tmp_path / "head" / REPORT_NAME).read_text())


METHOD_OPTIONS: list[dict[str, Any]] = [
    {"method": "eagle3", "precision": "bf16"},
    {"method": "mtp", "precision": "bf16"},
    {"method": "mtp"},
    {"method": "medusa", "tied_lm_head": False},
    {"method": "medusa", "learning_rate": 3e-2},
]


@pytest.mark.parametrize("given", METHOD_OPTIONS, ids=str)
def test_other_methods_and_precisions_learn_it_too(
    given: dict[str, Any], cycle: Path, tmp_path: Path
) -> None:
    report = train(cycle, tmp_path / "head", options(steps=60, **given))
    assert report.acceptance_length > 2
    assert report.points[-1].held_out_loss < report.points[0].held_out_loss


def test_bf16_takes_layers_that_norm_queries_and_keys(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "target", "qwen3")
    texts = cycle_texts(20, length=12)
    write_dataset(tmp_path / "data", make_model("qwen3"), texts, taps=("norm",))
    report = train(tmp_path, tmp_path / "head", options(method="mtp", steps=3, precision="bf16"))
    assert all(math.isfinite(point.held_out_loss) for point in report.points)
    assert report.num_steps == 3


@pytest.mark.parametrize("step", [1, 5, 8, 12])
def test_a_training_that_was_killed_gives_the_same_to_the_bit(
    step: int, cycle: Path, tmp_path: Path
) -> None:
    whole = train(cycle, tmp_path / "whole", options())
    with pytest.raises(Killed):
        train(cycle, tmp_path / "killed", options(), watch=kill_after(step))
    again = train(cycle, tmp_path / "killed", options(), resume=True)
    expected, found = (
        load_file(tmp_path / name / "model.safetensors") for name in ("whole", "killed")
    )
    assert expected.keys() == found.keys()
    for name, tensor in expected.items():
        assert torch.equal(tensor, found[name]), name
    assert [p.rates for p in again.points] == [p.rates for p in whole.points]
    assert [p.loss for p in again.points] == [p.loss for p in whole.points]
    assert not list((tmp_path / "killed").glob(f"*{STATE_NAME}*"))


def test_the_seed_decides(cycle: Path, tmp_path: Path) -> None:
    files = {}
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        train(cycle, tmp_path / name, options(seed=seed, steps=3))
        files[name] = (tmp_path / name / "model.safetensors").read_bytes()
    assert files["a"] == files["b"]
    assert files["a"] != files["c"]


def test_a_head_that_gets_no_better_ends_early(cycle: Path, tmp_path: Path) -> None:
    report = train(cycle, tmp_path / "head", options(steps=400, learning_rate=1e-12, patience=2))
    assert report.num_steps < 400
    assert report.num_steps == report.points[-1].step


def test_the_best_head_is_written_not_the_last(cycle: Path, tmp_path: Path) -> None:
    """A rate that ruins what was learned."""
    report = train(cycle, tmp_path / "head", options(steps=40, learning_rate=1.0, num_warmup=200))
    best = max(report.points, key=lambda point: point.length)
    assert report.best_step == best.step < report.num_steps
    assert report.acceptance_length == pytest.approx(best.length)


def test_a_time_budget_becomes_steps(cycle: Path, tmp_path: Path) -> None:
    report = train(cycle, tmp_path / "head", options(steps=None, minutes=0.02))
    assert report.num_steps > 5
    assert report.points[-1].step == report.num_steps


def test_the_maps_are_those_that_readers_expect(cycle: Path, tmp_path: Path) -> None:
    train(cycle, tmp_path / "head", options(steps=1))
    tensors = load_file(tmp_path / "head" / "model.safetensors")
    assert tensors["d2t"].dtype == torch.int64
    assert tensors["t2d"].dtype == torch.bool
    ids = torch.arange(V_DRAFT) + tensors["d2t"]
    assert torch.equal(tensors["t2d"].nonzero()[:, 0], ids)
    config = read_config(open_checkpoint(str(cycle / "target")).config)
    plan = plan_eagle3(open_head(tmp_path / "head"), config)
    assert plan.layout == "EAGLE-3, SpecForge"
    assert plan.taps == (1, 3, 4)
    assert plan.token_map is not None
    assert np.array_equal(plan.token_map, ids.numpy())


def test_a_killed_process_leaves_a_state_to_go_on_from(cycle: Path, tmp_path: Path) -> None:
    """SIGKILL, at no special moment."""
    command = [sys.executable, "-m", "specexport", "train", str(cycle / "target")]
    command += ["--data", str(cycle / "data"), "-o", str(tmp_path / "head"), "--threads", "1"]
    command += ["--steps", "30", "--batch-tokens", "128", "--save-every", "1", "--draft-vocab"]
    command += [str(V_DRAFT), "--weights", "fp32", "--no-measure"]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
        while process.poll() is None and not (tmp_path / "head" / STATE_NAME).is_file():
            time.sleep(0.05)
        process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    assert not (tmp_path / "head" / "model.safetensors").exists()
    refused = subprocess.run(command, capture_output=True, text=True, check=False)
    assert refused.returncode == 1
    assert "Give --resume to go on" in refused.stderr
    finished = subprocess.run([*command, "--resume"], capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr
    assert "Going on after step" in finished.stderr
    same = options(steps=30, batch_tokens=128, save_every=1, **_DEFAULTS)
    train(cycle, tmp_path / "other", same)
    found, expected = (
        (tmp_path / name / "model.safetensors").read_bytes() for name in ("head", "other")
    )
    assert found == expected
