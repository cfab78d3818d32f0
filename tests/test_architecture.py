"""The shape of the code base itself."""

import ast
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# A package may import itself and those before it.
ORDER = [
    "specexport.errors",
    "specexport.files",
    "specexport.gpu",
    "specexport.nvidia_library",
    "specexport.export",
    "specexport.engines",
    "specexport.runtime",
]


def _imports(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
    return names


@pytest.mark.parametrize("package", ["export", "engines", "runtime"])
def test_dependencies_point_one_way(package: str) -> None:
    allowed = ORDER[: ORDER.index(f"specexport.{package}") + 1]
    for path in sorted((ROOT / package).rglob("*.py")):
        for name in _imports(path):
            if name.split(".")[0] == "specexport":
                assert name.startswith(tuple(allowed)), f"{path} imports {name}"


def test_engines_and_runtime_take_only_the_manifest_from_export() -> None:
    for package in ("engines", "runtime"):
        for path in sorted((ROOT / package).rglob("*.py")):
            ours = {n for n in _imports(path) if n.startswith("specexport.export")}
            parts = {f"specexport.export.{name}" for name in ("manifest", "methods", "engine_spec")}
            assert ours <= parts, path


@pytest.mark.parametrize("package", ["engines", "runtime"])
def test_runtime_and_engines_need_no_export_package(package: str) -> None:
    heavy = {"torch", "transformers", "onnx", "onnx_ir", "gguf", "safetensors", "polygraphy"}
    for path in sorted((ROOT / package).rglob("*.py")):
        assert not heavy & {name.split(".")[0] for name in _imports(path)}, path


def test_every_data_file_is_in_the_wheel() -> None:
    config = tomllib.loads((ROOT / "pyproject.toml").read_text())
    listed = {
        (package, name)
        for package, names in config["tool"]["setuptools"]["package-data"].items()
        for name in names
    }
    found = {
        (".".join(path.parent.relative_to(ROOT).parts), path.name)
        for path in (ROOT / "specexport").rglob("*")
        if path.is_file() and path.suffix not in (".py", ".pyc")
    }
    assert listed == found


def test_every_package_folder_is_in_the_wheel() -> None:
    config = tomllib.loads((ROOT / "pyproject.toml").read_text())
    listed = set(config["tool"]["setuptools"]["packages"])
    found = {
        ".".join(path.parent.relative_to(ROOT).parts)
        for top in ("specexport", "specexport/export", "specexport/engines", "specexport/runtime")
        for path in (ROOT / top).rglob("__init__.py")
    }
    assert listed == found
