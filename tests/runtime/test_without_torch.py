"""The runtime needs neither torch nor transformers nor onnx."""

import subprocess
import sys
from pathlib import Path

from tests.make_tiny_bundle import make
from tests.wheel_check import HEAVY

BLOCK = """
import importlib.abc, importlib.util, runpy, sys
class Block(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {heavy!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
real = importlib.util.find_spec
importlib.util.find_spec = lambda n, p=None: None if n in {heavy!r} else real(n, p)
sys.meta_path.insert(0, Block())
sys.argv = ["wheel_check.py", {bundle!r}, "blocked"]
runpy.run_path({script!r}, run_name="__main__")
"""


def test_a_bundle_runs_with_the_heavy_packages_blocked(tmp_path: Path) -> None:
    make(tmp_path / "bundle")
    code = BLOCK.format(
        heavy=HEAVY,
        bundle=str(tmp_path / "bundle"),
        script=str(Path(__file__).parents[1] / "wheel_check.py"),
    )
    finished = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert finished.returncode == 0, finished.stderr
    assert "4 passed" in finished.stdout
