"""Costs of steps: measured, kept in the bundle, used for adaptive draft lengths."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from specexport.engines.ort import describe_machine
from specexport.errors import BundleError
from specexport.runtime import load as load_module
from specexport.runtime.engine import Engine
from specexport.runtime.options import EngineOptions
from specexport.runtime.params import SamplingParams
from specexport.runtime.tune import tune
from specexport.runtime.tuning import TUNING_NAME, read_costs


@pytest.fixture
def bundle(tiny_bundle: Path, tmp_path: Path) -> Path:
    untuned = shutil.ignore_patterns(TUNING_NAME)
    return Path(shutil.copytree(tiny_bundle, tmp_path / "bundle", ignore=untuned))


def outputs(bundle: Path, **options: Any) -> list[tuple[int, ...]]:
    """Greedy and seeded outputs of several requests in one batch."""
    with Engine(bundle, EngineOptions(max_slots=3, **options)) as engine:
        streams = [
            engine.submit(
                f"ab{i}ab{i}ab", SamplingParams(temperature=0.9 * (i % 2), seed=i, max_tokens=30)
            )
            for i in range(5)
        ]
        return [stream.result().token_ids for stream in streams]


def test_tuning_is_written_for_this_machine_and_grows_with_the_step(bundle: Path) -> None:
    tuning = tune(bundle, num_threads=1)
    table = tuning.costs["target/model.onnx"]
    assert list(table.seconds) == sorted(table.seconds)
    assert table.seconds[0] > 0
    machine = describe_machine(1)
    assert read_costs(bundle, machine) == tuning.costs
    assert read_costs(bundle, machine.replace("1 threads", "2 threads")) == {}


@pytest.mark.parametrize(
    "content", ["", "{}", "[1]", "nonsense", '{"machine": "x", "costs": {"a": 1}}']
)
def test_a_damaged_table_is_measured_again(bundle: Path, content: str) -> None:
    (bundle / TUNING_NAME).write_text(content)
    assert read_costs(bundle, describe_machine(1)) == {}
    outputs(bundle, adaptive=True, num_threads=1)
    assert json.loads((bundle / TUNING_NAME).read_text())["machine"] == describe_machine(1)


def test_adaptive_lengths_change_no_output(bundle: Path) -> None:
    plain = outputs(bundle, method="none")
    assert outputs(bundle, adaptive=True) == plain
    assert outputs(bundle, adaptive=True, method="suffix", num_speculative_tokens=3) == plain


def test_adaptive_lengths_of_a_draft_model_change_no_output(draft_bundle: Path) -> None:
    """Its drafts are certain then, so that their length cannot matter to a seeded output."""
    plain = outputs(draft_bundle, method="none")
    assert outputs(draft_bundle, adaptive=True) == plain


def test_a_known_table_is_not_measured_again(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tune(bundle, num_threads=1)

    def fail(*arguments: object) -> None:
        raise AssertionError("measured again")

    monkeypatch.setattr(load_module, "measure_costs", fail)
    outputs(bundle, adaptive=True, num_threads=1)
    with pytest.raises(AssertionError, match="measured again"):
        outputs(bundle, adaptive=True, num_threads=2)


def test_what_cannot_be_kept_is_measured_and_leaves_nothing_behind(bundle: Path) -> None:
    (bundle / TUNING_NAME).mkdir()  # stands for a bundle that cannot be written to
    before = sorted(bundle.iterdir())
    assert outputs(bundle, adaptive=True) == outputs(bundle, method="none")
    with pytest.raises(OSError, match=r"tuning\.json"):
        tune(bundle, num_threads=1)
    assert sorted(bundle.iterdir()) == before


def test_an_engine_with_the_smallest_cache_loads(bundle: Path) -> None:
    options = EngineOptions(max_length=3, step_tokens=1, max_slots=1)
    with Engine(bundle, options) as engine:
        lengths = [len(engine.submit([5] * n).result().token_ids) for n in (1, 2)]
    assert lengths == [2, 1]


def test_a_damaged_bundle_is_not_measured(bundle: Path) -> None:
    (bundle / "target" / "model.weights").write_bytes(b"")
    with pytest.raises(BundleError, match=r"model\.weights"):
        tune(bundle)
