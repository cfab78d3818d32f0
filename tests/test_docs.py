"""The documentation tells the truth: its code runs, its commands and files exist."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])


def blocks_of(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)


@pytest.mark.parametrize(
    ("index", "name", "printed"),
    [
        (0, "embed.py", "refused: The prompt is empty"),
        (1, "embed_async.py", "refused: The engine drains"),
    ],
)
def test_the_readme_shows_the_examples_as_they_run(
    index: int, name: str, printed: str, tiny_bundle: Path
) -> None:
    """The README's Python blocks are the bodies of the examples, word for word."""
    example = ROOT / "examples" / name
    assert len(blocks_of("README.md")) == 2
    for line in blocks_of("README.md")[index].splitlines():
        assert line.strip() in example.read_text(), line
    command = [sys.executable, str(example), str(tiny_bundle)]
    finished = subprocess.run(command, capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr
    assert printed in finished.stdout


def test_the_programs_of_the_page_on_embedding_run(tiny_bundle: Path) -> None:
    blocks = blocks_of("docs/embedding.md")
    assert len(blocks) == 2
    for block in blocks:
        exec(block, {"bundle": str(tiny_bundle)})


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
