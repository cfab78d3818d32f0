"""`specexport train` from a data set to a bundle that drafts with the head."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from specexport.cli import cli
from specexport.engines.ort import describe_machine
from specexport.engines.ort_session import usable_cpus
from specexport.export.manifest import read_manifest
from specexport.runtime.costs import StepCosts
from specexport.runtime.tuning import Tuning, write_tuning
from specexport.training.options import TrainOptions
from specexport.training.prediction import predict
from specexport.training.report import TrainReport
from tests.tiny_dataset import cycle_target, cycle_texts, write_dataset


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


def test_the_predicted_speed_up_is_that_of_the_best_draft_length(
    cycle: Path, tmp_path: Path
) -> None:
    """Steps of 10 ms, and 1 ms for each further token; a head with half of the weights: 5 ms."""
    run("build", cycle / "target", "-o", tmp_path / "bundle")
    manifest = read_manifest(tmp_path / "bundle")
    report = TrainReport.model_construct(
        options=TrainOptions(method="eagle3"),
        acceptance_rates=(0.8, 0.5),
        num_parameters=manifest.target.num_parameters // 2,
    )
    assert predict(tmp_path / "bundle", report) is None
    seconds = (0.010, 0.011, 0.012)
    costs = StepCosts(num_tokens=(1, 2, 3), seconds=seconds, row_context_s=0, pair_s=0)
    tuning = Tuning(machine=describe_machine(usable_cpus()), costs={manifest.target.path: costs})
    write_tuning(tmp_path / "bundle", tuning)
    found = predict(tmp_path / "bundle", report)
    assert found is not None
    assert found.num_draft_tokens == 1  # 1.8 tokens in 16 ms, against 2.2 in 22 ms
    assert found.speed_up == pytest.approx(1.8 * 10 / 16, rel=1e-3)


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
