"""`make test-gpu`: runs the tests marked `gpu` and writes down what ran, on what.

Files are build/gpu-tests.xml (JUnit) and build/gpu-tests.md. The exit status is 0 where at least
one test ran on a GPU and none failed.
"""

import platform
import shutil
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from xml.etree import ElementTree

import pytest

from specexport.errors import ConfigError
from specexport.gpu import find_gpu

_LIBRARIES = (
    "onnxruntime-gpu",
    "onnxruntime",
    "tensorrt",
    "tensorrt-rtx",
    "cuda-bindings",
    "polygraphy",
    "numpy",
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """One test: passed, skipped or failed, and the reason for all but the first."""

    test: str
    what: str
    reason: str


def main(folder: Path = Path("build")) -> int:
    """Run them all; the exit status."""
    folder.mkdir(exist_ok=True)
    xml = folder / "gpu-tests.xml"
    status = pytest.main(["-m", "gpu", f"--junitxml={xml}", "tests"])
    outcomes = read_outcomes(xml)
    report = "\n".join([*describe_machine(), "", *table(outcomes), "", verdict(outcomes), ""])
    (folder / "gpu-tests.md").write_text(report)
    print(f"\n{verdict(outcomes)}\nThe report is {folder / 'gpu-tests.md'}.")
    return int(status) or int(not any(outcome.what == "passed" for outcome in outcomes))


def read_outcomes(xml: Path) -> list[Outcome]:
    """All tests of a JUnit report."""
    return [_outcome(case) for case in ElementTree.parse(xml).iter("testcase")]


def _outcome(case: ElementTree.Element) -> Outcome:
    name = f"{case.get('classname', '')}: {case.get('name', '').replace('_', ' ')}"
    for tag, what in (("failure", "failed"), ("error", "failed"), ("skipped", "skipped")):
        if (found := case.find(tag)) is not None:
            return Outcome(name, what, " ".join(found.get("message", "").split())[:300])
    return Outcome(name, "passed", "")


def table(outcomes: list[Outcome]) -> list[str]:
    """For Markdown."""
    rows = [
        f"| {outcome.test} | {outcome.what} | {outcome.reason.replace('|', '/')} |"
        for outcome in outcomes
    ]
    return ["| test | outcome | why |", "|---|---|---|", *rows]


def verdict(outcomes: list[Outcome]) -> str:
    """What all of it proves."""
    counts = Counter(outcome.what for outcome in outcomes)
    if counts["failed"]:
        return f"FAILED: {counts['failed']} of {len(outcomes)} GPU tests."
    if not counts["passed"]:
        reasons = Counter(outcome.reason for outcome in outcomes)
        why = reasons.most_common(1)[0][0] if reasons else "no test is marked gpu"
        return f"NOTHING WAS PROVED: all {len(outcomes)} GPU tests were skipped ({why})."
    skipped = f", {counts['skipped']} were skipped" if counts["skipped"] else ""
    return f"{counts['passed']} GPU tests passed{skipped}."


def describe_machine() -> list[str]:
    """The GPU, its driver, and the libraries."""
    try:
        gpu = str(find_gpu())
    except ConfigError as error:
        gpu = f"none ({error})"
    libraries = [f"{name} {found}" for name in _LIBRARIES if (found := _version(name))]
    return [
        "# GPU tests",
        "",
        f"- GPU: {gpu}",
        f"- driver: {_driver()}",
        f"- {platform.system()} {platform.machine()}, Python {platform.python_version()}",
        f"- {', '.join(libraries)}",
    ]


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _driver() -> str:
    if (command := shutil.which("nvidia-smi")) is None:
        return "not known (there is no nvidia-smi)"
    query = [command, "--query-gpu=driver_version", "--format=csv,noheader"]
    finished = subprocess.run(query, capture_output=True, text=True, check=False, timeout=30)
    lines = finished.stdout.split()
    return lines[0] if finished.returncode == 0 and lines else "not known (nvidia-smi failed)"


if __name__ == "__main__":
    sys.exit(main())
