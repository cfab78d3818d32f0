"""`specexport doctor`."""

import json
import os
import platform
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

import click
from rich.console import Console
from rich.markup import escape
from rich.table import Table

_EXPORT = ("torch", "transformers", "onnx", "onnx_ir", "safetensors", "gguf", "polygraphy")
_RUNTIME = ("onnxruntime", "numpy", "tokenizers", "jinja2", "pydantic")

_EXAMPLES = """\b
Examples:
  specexport doctor
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
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(as_json: bool) -> None:
    """Show what is installed, which engines can be built and run here, and what fixes the rest.

    The exit status is 0 when bundles can be run, 1 otherwise.
    """
    checks = [check() for check in _CHECKS]
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
    devices = [name for name in ("/dev/nvidia0", "/dev/nvidiactl") if os.path.exists(name)]
    detail = "device found" if devices else "no /dev/nvidia* device"
    fix = "" if devices else "needs an NVIDIA GPU and its driver"
    return Check("NVIDIA GPU", bool(devices), detail, fix)


def _library(name: str, module: str) -> Callable[[], Check]:
    """An engine that is planned: nothing that is installed makes this version build it."""

    def check() -> Check:
        found = _installed_version(module) if find_spec(module) else "not installed"
        return Check(name, False, f"{module} {found}", "not in this version: use the CPU engine")

    return check


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
    _library("TensorRT engines", "tensorrt"),
    _library("TensorRT-RTX engines", "tensorrt_rtx"),
]


def _print(checks: list[Check]) -> None:
    table = Table(box=None, padding=(0, 2, 0, 0), title=f"Python {platform.python_version()}")
    for heading in ("", "", "found", "to fix"):
        table.add_column(heading)
    for check in checks:
        mark = "[green]✓[/green]" if check.works else "[yellow]–[/yellow]"
        table.add_row(mark, check.name, check.detail, escape(check.fix))
    Console(highlight=False).print(table)
