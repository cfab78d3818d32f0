"""`specexport doctor`."""

import json
import os
import platform
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

import click
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from specexport.errors import SpecExportError

_EXPORT = ("torch", "transformers", "onnx", "onnx_ir", "safetensors", "gguf", "polygraphy")
_RUNTIME = ("onnxruntime", "numpy", "tokenizers", "jinja2", "pydantic")

_EXAMPLES = """\b
Examples:
  specexport doctor
  specexport doctor smollm2
  specexport doctor --json
"""


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that this machine can do or not, and what would change that."""

    name: str
    works: bool
    detail: str
    fix: str = ""


@click.command(epilog=_EXAMPLES)
@click.argument("bundle", type=click.Path(path_type=Path), required=False)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(bundle: Path | None, as_json: bool) -> None:
    """Show what is installed, which engines can be built and run here, and what fixes the rest.

    With a BUNDLE, also whether its engines fit this machine. The exit status is 0 when bundles can
    be run, 1 otherwise.
    """
    checks = [check() for check in _CHECKS] + _run_on_gpu()
    if bundle is not None:
        checks += _engines_of(bundle)
    if as_json:
        click.echo(json.dumps({"checks": [asdict(check) for check in checks]}))
    else:
        _print(checks)
    if not checks[0].works:
        raise SystemExit(1)


def _run_on_cpu() -> Check:
    missing = [name for name in _RUNTIME if find_spec(name) is None]
    if missing:
        return Check(
            "run on any CPU", False, f"missing: {', '.join(missing)}", "pip install specexport"
        )
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    detail = f"onnxruntime {_installed_version('onnxruntime')}, {cpus} CPUs, {platform.machine()}"
    return Check("run on any CPU", True, detail)


def _build() -> Check:
    missing = [name for name in _EXPORT if find_spec(name) is None]
    if missing:
        fix = "pip install 'specexport[export]'"
        return Check("build and validate bundles", False, f"missing: {', '.join(missing)}", fix)
    detail = ", ".join(f"{name} {_installed_version(name)}" for name in _EXPORT)
    return Check("build and validate bundles", True, detail)


def _structured_output() -> Check:
    if find_spec("llguidance") is None:
        fix = "pip install 'specexport[structured]'"
        return Check("structured output", False, "missing: llguidance", fix)
    detail = f"llguidance {_installed_version('llguidance')}"
    return Check("structured output", True, detail)


def _nvidia_gpu() -> Check:
    from specexport.gpu import find_gpu

    try:
        return Check("NVIDIA GPU", True, str(find_gpu()))
    except SpecExportError as error:
        return Check("NVIDIA GPU", False, str(error), "needs an NVIDIA GPU and its driver")


def _library(module: str, where: str, fix: str) -> Callable[[], Check]:
    """Whether plans can be built, which may be where none can run."""
    name = f"build {module.replace('_', '-')} engines"

    def check() -> Check:
        if find_spec(module) is None:
            return Check(name, False, "not installed", fix)
        return Check(name, True, f"{module} {_installed_version(module)}, {where}")

    return check


def _run_on_gpu() -> list[Check]:
    """Each engine of a GPU by its name, and the one thing that it lacks here."""
    if find_spec("onnxruntime") is None:
        return []  # the first check says so
    from specexport.engines.available import ENGINES, missing

    checks = []
    for engine in ENGINES[1:]:
        lack = missing(engine)
        detail, fix = (lack.what, lack.remedy) if lack else ("can run here", "")
        checks.append(Check(f"run on {engine}", lack is None, detail, fix))
    return checks


def _engines_of(bundle: Path) -> list[Check]:
    """One check for each engine: it fits the library and the GPU of this machine, or why not."""
    from specexport.engines.plan import build_command, problem
    from specexport.export.manifest import read_manifest
    from specexport.gpu import local_gpu

    checks, gpu = [], local_gpu()
    for engine in read_manifest(bundle).engines:
        name, reason = f"{bundle}: {engine.folder}", problem(bundle, engine, gpu)
        fix = build_command(bundle, engine, gpu if gpu not in engine.gpus else None)
        checks.append(Check(name, not reason, reason or "fits", fix if reason else ""))
    return checks


def _installed_version(module: str) -> str:
    names = {"onnxruntime": ("onnxruntime", "onnxruntime-gpu"), "tensorrt_rtx": ("tensorrt-rtx",)}
    for name in names.get(module, (module,)):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return "of unknown version"


_CHECKS: list[Callable[[], Check]] = [
    _run_on_cpu,
    _build,
    _structured_output,
    _nvidia_gpu,
    _library("tensorrt_rtx", "for GPUs that need not be here", "pip install 'specexport[rtx]'"),
    _library("tensorrt", "for the GPU here", "pip install tensorrt"),
]


def _print(checks: list[Check]) -> None:
    table = Table(box=None, padding=(0, 2, 0, 0), title=f"Python {platform.python_version()}")
    for heading in ("", "", "found", "to fix"):
        table.add_column(heading)
    for check in checks:
        mark = "[green]✓[/green]" if check.works else "[yellow]–[/yellow]"
        table.add_row(mark, check.name, check.detail, escape(check.fix))
    Console(highlight=False).print(table)
