"""`specexport data`: prompts in, a data set out."""

import json
import random
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from specexport.cli import cli
from specexport.commands.option_types import SizeType
from specexport.training.samples import Dataset


def test_data_are_made_and_the_answers_that_are_there_are_taken(
    tiny_checkpoint: Path, tmp_path: Path
) -> None:
    prompts = tmp_path / "a.jsonl"
    prompts.write_text("".join(f'{{"prompt": "Say {i}"}}\n' for i in range(60)))
    out = tmp_path / "data"
    shared = ["data", str(tiny_checkpoint), "-o", str(out), "--methods", "medusa", "--threads", "1"]
    asked = ["--prompts", str(prompts), "--max-tokens", "5", "--max-length", "64"]
    refused = CliRunner().invoke(cli, [*shared, *asked])
    assert refused.exit_code == 1
    assert "60 sequences with 300 answer tokens; training needs at least 50 with 10000" in (
        refused.output
    )
    given = tmp_path / "long.txt"
    given.write_text("".join(random.Random(0).choices("abcde ", k=11_000)))
    made = CliRunner().invoke(
        cli, [*shared, "--given", str(given), "--max-length", "64", "--max-tokens", "5"]
    )
    assert made.exit_code == 0, made.output
    again = CliRunner().invoke(cli, [*shared, "--max-length", "64", "--json"])
    spec = json.loads(again.stdout)
    data = Dataset.open(out)
    assert spec == data.spec.model_dump(mode="json")
    assert spec["recipe"]["sources"]["a.jsonl"] == 60
    assert spec["taps"] == ["norm"]


def test_without_prompts_or_answers_there_is_nothing_to_learn(
    tiny_checkpoint: Path, tmp_path: Path
) -> None:
    shared = ["data", str(tiny_checkpoint), "-o", str(tmp_path / "data"), "--methods", "mtp"]
    refused = CliRunner().invoke(cli, shared)
    assert refused.exit_code == 1
    assert "nothing to learn from" in refused.output
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize(
    ("text", "size_bytes"), [("4GB", 4 * 10**9), ("500 mb", 5 * 10**8), ("7", 7), ("1.5KB", 1500)]
)
def test_sizes_have_units(text: str, size_bytes: int) -> None:
    assert SizeType().convert(text, None, None) == size_bytes


@pytest.mark.parametrize("text", ["", "GB", "4GiB", "-1GB", "0", "0MB", "1e9"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(click.BadParameter, match="is no size"):
        SizeType().convert(text, None, None)
