"""`specexport bench` on the real SmolLM2."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from specexport.cli import cli

pytestmark = pytest.mark.model

TEXT = "The red door leads to the garden, the blue door to the cellar, the green door to the roof."


def test_copies_are_drafted_well_at_any_load_and_outputs_stay_the_same(
    smollm2_bundle: Path, tmp_path: Path
) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text(f"Repeat word for word: {TEXT}\nCopy this sentence: {TEXT} {TEXT}\n")
    options = ("--concurrency", "1,2", "--requests", "2", "-n", "24", "--rounds", "1")
    files = ("--prompts", str(prompts), "--plot", str(tmp_path / "x.png"), "--json", "-")
    finished = CliRunner().invoke(cli, ["bench", str(smollm2_bundle), *options, *files])
    assert finished.exit_code == 0, finished.stderr
    for load in json.loads(finished.stdout)["loads"]:
        for variant in load["variants"]:
            assert variant["lossless"]
            assert variant["greedy_requests_different"] == 0
        off, fixed, _ = (variant["drafting"] for variant in load["variants"])
        assert off["tokens_per_step"] == 1
        # Most of the output is a copy of the prompt.
        assert fixed["tokens_per_step"] > 1.5
        assert fixed["acceptance_rate_per_position"][0] > 0.6
    assert (tmp_path / "x.png").stat().st_size > 10_000
