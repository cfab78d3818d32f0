"""`python -m tests.make_tiny_bundle FOLDER`: a bundle for the check of the installed wheel."""

import shutil
import sys
import tempfile
from pathlib import Path

from specexport.export.build import BuildOptions, build
from specexport.export.methods import DraftMethod
from tests.tiny import write_checkpoint


def make(output: Path) -> None:
    """The tiny Llama with a tiny Qwen3 as draft model."""
    shutil.rmtree(output, ignore_errors=True)
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        target = write_checkpoint(Path(folder) / "target", "llama")
        draft = write_checkpoint(Path(folder) / "draft", "qwen3")
        build(str(target), output, BuildOptions(DraftMethod(), draft=str(draft)))


if __name__ == "__main__":
    make(Path(sys.argv[1]))
