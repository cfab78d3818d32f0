"""The report of `make test-gpu`, from a real run of pytest."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.gpu_report import describe_machine, read_outcomes, table, verdict

TESTS = """
import pytest

def test_a_sum():
    pass

@pytest.mark.skip(reason="no GPU | none")
def test_of_a_gpu():
    pass

def test_that_is_wrong():
    assert 1 == 2, "not so"
"""


@pytest.fixture
def xml(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """The JUnit report of those of the three tests whose names are given."""
    (tmp_path / "test_three.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-q", "--junitxml=report.xml", "-k", request.param]
    subprocess.run(command, cwd=tmp_path, capture_output=True, check=False)
    return tmp_path / "report.xml"


@pytest.mark.parametrize("xml", ["test_"], indirect=True)
def test_every_outcome_is_a_row(xml: Path) -> None:
    outcomes = read_outcomes(xml)
    assert [outcome.what for outcome in outcomes] == ["passed", "skipped", "failed"]
    rows = table(outcomes)[2:]
    assert rows[0] == "| test_three: test a sum | passed |  |"
    assert rows[1] == "| test_three: test of a gpu | skipped | no GPU / none |"
    assert "not so" in rows[2]
    assert verdict(outcomes) == "FAILED: 1 of 3 GPU tests."


@pytest.mark.parametrize("xml", ["gpu"], indirect=True)
def test_a_run_that_skips_all_proves_nothing(xml: Path) -> None:
    assert verdict(read_outcomes(xml)) == (
        "NOTHING WAS PROVED: all 1 GPU tests were skipped (no GPU | none)."
    )


@pytest.mark.parametrize("xml", ["gpu or sum"], indirect=True)
def test_what_passed_and_what_did_not_run_are_counted(xml: Path) -> None:
    assert verdict(read_outcomes(xml)) == "1 GPU tests passed, 1 were skipped."


def test_the_machine_is_described() -> None:
    assert any(line.startswith("- GPU: ") for line in describe_machine())
