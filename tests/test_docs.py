"""The documentation tells the truth: its code runs, its commands and files exist."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])


def test_the_readme_shows_the_example_as_it_runs(tiny_bundle: Path) -> None:
    """The README's Python block is the body of examples/embed.py, word for word."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert len(blocks) == 1
    example = (ROOT / "examples" / "embed.py").read_text()
    for line in blocks[0].splitlines():
        assert line.strip() in example, line
    command = [sys.executable, str(ROOT / "examples" / "embed.py"), str(tiny_bundle)]
    finished = subprocess.run(command, capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr
    assert "refused: The prompt is empty" in finished.stdout


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_paths_exist(page: Path) -> None:
    for target in re.findall(r"\]\((?!http)([^)#]+)\)", page.read_text()):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_and_their_options_exist(page: Path) -> None:
    from click.testing import CliRunner

    from specexport.cli import cli

    for line in re.findall(r"^\$? ?specexport (.*)$", page.read_text(), re.MULTILINE):
        command = line.split()[0]
        shown = CliRunner().invoke(cli, [command, "--help"]).output if command[0] != "-" else ""
        for option in re.findall(r"(?<=\s)(--[a-z-]+)", line):
            if option not in ("--help", "--version"):
                assert option in shown, f"{page.name}: specexport {command} has no {option}"


def test_make_targets_named_in_the_readme_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"`make ([a-z-]+)", (ROOT / "README.md").read_text()):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
