"""Machine, versions and command beside every figure; prompts from text that Python ships."""

import inspect
import platform
import sys
from collections.abc import Iterator
from importlib import import_module
from importlib.metadata import version
from pathlib import Path

_MODULES = (
    *("textwrap", "heapq", "bisect", "shutil", "random", "statistics", "fractions", "queue"),
    *("argparse", "calendar", "collections", "configparser", "csv", "datetime", "difflib"),
)


def header(*packages: str) -> str:
    """What a figure needs beside it."""
    names = ("onnxruntime", "numpy", *packages)
    found = ", ".join(f"{name} {version(name)}" for name in names)
    return (
        f"machine: {_processor()}; Python {platform.python_version()}, {found}\n"
        f"command: python -m {Path(sys.argv[0]).parent.name}.{Path(sys.argv[0]).stem} "
        f"{' '.join(sys.argv[1:])}"
    )


def _processor() -> str:
    from specexport.engines.ort_session import usable_cpus

    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        lines = [line for line in cpuinfo.read_text().splitlines() if line.startswith("model name")]
        model = lines[0].split(":", 1)[1].strip() if lines else model
    return f"{model}, {usable_cpus()} CPUs"


def standard_library_prompts(num_prompts: int) -> list[str]:
    """Requests about real functions: to document, to copy, to rename, to explain."""
    tasks = (
        "Repeat the following function and add a docstring:\n\n{}",
        "Explain in two sentences what this function does:\n\n{}",
        "Write out this code once more, exactly as it is:\n\n{}",
        "Rename the first parameter to `value` in this function:\n\n{}",
    )
    functions = list(_functions())
    if len(functions) < num_prompts:
        raise ValueError(f"only {len(functions)} functions found; {num_prompts} were asked for")
    return [
        tasks[i % len(tasks)].format(source) for i, source in enumerate(functions[:num_prompts])
    ]


def _functions() -> Iterator[str]:
    for name in _MODULES:
        module = import_module(name)
        for _, function in inspect.getmembers(module, inspect.isfunction):
            if function.__module__ == name:
                source = inspect.getsource(function)
                if 100 < len(source) < 450:
                    yield source
        for _, cls in inspect.getmembers(module, inspect.isclass):
            for method in vars(cls).values():
                if inspect.isfunction(method) and method.__module__ == name:
                    source = inspect.getsource(method)
                    if 100 < len(source) < 450:
                        yield inspect.cleandoc(source)
