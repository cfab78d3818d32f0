"""`specexport train` from a data set to a bundle that drafts with the head."""

import json
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner

from specexport.cli import cli
from specexport.export.manifest import read_manifest
from specexport.runtime.costs import StepCosts
from specexport.training.prediction import predict
from specexport.training.report import TrainReport
from tests.head_bundles import MAKERS
from tests.tiny_dataset import cycle_target, cycle_texts, write_dataset
from tests.training_tools import V_DRAFT, Killed, kill_after, options, train


def run(*arguments: object) -> str:
    result = CliRunner().invoke(cli, [str(argument) for argument in arguments])
    assert result.exit_code == 0, result.output
    return result.output


@pytest.fixture(scope="module")
def cycle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cycle")
    _, model = cycle_target(folder)
    write_dataset(folder / "data", model, cycle_texts(60))
    return folder


@pytest.mark.parametrize("method", ["eagle3", "medusa", "mtp"])
def test_a_trained_head_is_built_and_drafts(method: str, cycle: Path, tmp_path: Path) -> None:
    target, head, bundle = cycle / "target", tmp_path / "head", tmp_path / "bundle"
    shown = run(
        *("train", target, "--method", method, "--data", cycle / "data", "-o", head),
        *("--steps", 60, "--batch-tokens", 256, "--learning-rate", 0.02, "--threads", 1),
    )
    assert "expected acceptance length" in shown
    assert f"specexport build {target} --method {method} --head {head} -o BUNDLE" in shown
    assert (head / "training.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in head.iterdir()) == [
        "config.json",
        "model.safetensors",
        "training.json",
        "training.png",
    ]
    report = TrainReport.model_validate_json((head / "training.json").read_text())
    run("build", target, "--method", method, "--head", head, "-o", bundle)
    found = json.loads(
        run("generate", bundle, "to be", "-n", 40, "--fixed", "--json", "--ignore-eos")
    )
    assert report.acceptance_length > 1.5
    assert found["stats"]["acceptance_length"] > 1.5  # by chance 1.004


@pytest.mark.parametrize(
    ("name", "num_draft_tokens", "speed_up"),
    [
        ("eagle3, SpecForge", 1, 1.8 * 10 / 16),  # against 2.2 tokens in 22 ms
        ("medusa", 2, 2.2 * 10 / 17),
    ],
)
def test_the_predicted_speed_up_is_that_of_the_best_draft_length(
    name: str, num_draft_tokens: int, speed_up: float, tmp_path: Path
) -> None:
    """Steps of 10 ms, and 1 ms for each further token; a step of the head takes 5 ms."""
    manifest = read_manifest(MAKERS[name](tmp_path, "hidden", 0.25).path)
    report = TrainReport.model_construct(acceptance_rates=(0.8, 0.5))
    target = _costs(0.010, 0.011, 0.012)
    costs = dict.fromkeys((spec.path for spec in manifest.graphs.values()), _costs(0.005))
    found = predict(manifest, costs | {manifest.target.path: target}, report)
    assert found.num_draft_tokens == num_draft_tokens
    assert found.speed_up == pytest.approx(speed_up)


def _costs(*seconds: float) -> StepCosts:
    sizes = tuple(range(1, len(seconds) + 1))
    return StepCosts(num_tokens=sizes, seconds=seconds, row_context_s=0, pair_s=0)


def test_prompts_become_a_head_and_a_bundle_with_one_command(cycle: Path, tmp_path: Path) -> None:
    prompts, head, bundle = (tmp_path / name for name in ("a.jsonl", "head", "bundle"))
    given = ("--data", prompts, "-o", head, "--steps", 5, "--batch-tokens", 256, "--threads", 1)
    command = ("train", cycle / "target", *given, "--build", bundle)
    prompts.write_text("".join(f'{{"prompt": "Say {i}"}}\n' for i in range(70)))
    refused = CliRunner().invoke(cli, [str(argument) for argument in command])
    assert refused.exit_code == 1
    assert "training needs at least 50 with 10000" in refused.output
    answered = (tmp_path / "head-data" / "answers.jsonl").read_text()
    prompts.write_text("".join(f'{{"prompt": "Say {i}"}}\n' for i in range(120)))
    shown = run(*command)
    assert (tmp_path / "head-data" / "answers.jsonl").read_text().startswith(answered)
    trial = TrainReport.model_validate_json((head / "training.json").read_text()).trial
    assert trial is not None
    assert trial.num_different == 0
    assert trial.num_prompts > 1
    assert min(trial.predicted_speed_up, trial.fixed_speed_up, trial.adaptive_speed_up) > 0
    assert "Predicted: " in shown
    assert "the same outputs" in shown
    assert read_manifest(bundle).method.kind == "eagle3"


def test_several_processes_make_no_data(
    cycle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each would answer the prompts into the same file."""
    (tmp_path / "a.jsonl").write_text('{"prompt": "Say it"}\n')
    monkeypatch.setenv("WORLD_SIZE", "2")
    given = ("--data", tmp_path / "a.jsonl", "-o", tmp_path / "head")
    arguments = [str(argument) for argument in ("train", cycle / "target", *given)]
    result = CliRunner().invoke(cli, arguments)
    assert result.exit_code == 1
    assert "Make it first with specexport data" in " ".join(result.output.split())
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]


def test_a_training_goes_on_with_the_data_that_it_was_begun_with(
    cycle: Path, tmp_path: Path
) -> None:
    """Though the file of prompts has grown since."""
    head, data, prompts = (tmp_path / name for name in ("head", "head-data", "a.jsonl"))
    shutil.copytree(cycle / "data", data)
    with pytest.raises(Killed):
        train(cycle, head, options(steps=4, num_warmup=20), watch=kill_after(3))
    prompts.write_text('{"prompt": "Something new"}\n')
    shown = run(
        *("train", cycle / "target", "--data", prompts, "-o", head, "--resume", "--no-measure"),
        *("--steps", 4, "--batch-tokens", 256, "--draft-vocab", V_DRAFT, "--draft-steps", 3),
        *("--learning-rate", 1e-2, "--save-every", 2, "--threads", 1),
    )
    assert "which is taken as it is" in shown
    assert "Going on after step 2" in shown
    assert not (data / "answers.jsonl").exists()


def test_data_that_contradict_each_other_are_refused(cycle: Path, tmp_path: Path) -> None:
    prompts, data = tmp_path / "a.txt", cycle / "data"
    prompts.write_text("What is it?")
    cases: list[tuple[tuple[object, ...], str]] = [
        ((), "nothing to learn from"),
        (("--data", tmp_path / "none"), "does not exist"),
        (("--data", data, "--data", prompts), "and something else"),
        (("--data", data, "--self-made", 3), "holds data"),
        (("--data", data, "--no-measure", "--build", tmp_path / "b"), "Leave out --no-measure"),
        (("--data", data, "--build", data), "exists"),
    ]
    for given, reason in cases:
        arguments = ["train", cycle / "target", "-o", tmp_path / "head", *given]
        result = CliRunner().invoke(cli, [str(argument) for argument in arguments])
        assert result.exit_code == 1, result.output
        assert reason in result.output.replace("\n", " ")
        assert not (tmp_path / "head").exists()
        assert not (tmp_path / "head-data").exists()
