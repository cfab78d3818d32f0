"""`tuning.json`: what the steps of a bundle's graphs cost, on the machine where it was measured."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from specexport.engines.ort import describe_machine
from specexport.engines.ort_session import usable_cpus
from specexport.files import write_whole
from specexport.runtime.costs import StepCosts

TUNING_NAME = "tuning.json"

Measure = Callable[[], StepCosts]


class Tuning(BaseModel):
    """The whole of `tuning.json`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    machine: str
    """Where it was measured: of another machine it says nothing."""
    costs: dict[str, StepCosts]
    """By the path of the graph in the bundle."""


def read_costs(bundle: Path, machine: str) -> dict[str, StepCosts]:
    """What `tuning.json` says for this machine; nothing where it is missing, foreign or damaged."""
    try:
        tuning = Tuning.model_validate_json((bundle / TUNING_NAME).read_text())
    except (OSError, ValidationError, UnicodeDecodeError):
        return {}
    return tuning.costs if tuning.machine == machine else {}


def is_tuned(bundle: Path, num_threads: int) -> bool:
    """True where the bundle has costs for this CPU; `num_threads` as in `EngineOptions`."""
    return bool(read_costs(bundle, describe_machine(num_threads or usable_cpus())))


def write_tuning(bundle: Path, tuning: Tuning) -> None:
    """Write `tuning.json` whole or not at all; raises `OSError` where the bundle is read-only."""
    write_whole(bundle / TUNING_NAME, (tuning.model_dump_json(indent=2) + "\n").encode())


def costs_of(
    bundle: Path, measures: Mapping[str, Measure], machine: str, *, is_kept: bool = True
) -> dict[str, StepCosts]:
    """The costs of each graph on the machine (`Backend.machine`), by its path.

    What the bundle does not know yet is measured now, while the caches are free, and, if it
    `is_kept`, written to the bundle where that can be.
    """
    known = read_costs(bundle, machine)
    missing = {path: measure for path, measure in measures.items() if path not in known}
    if missing:
        known |= {path: measure() for path, measure in missing.items()}
        if is_kept:
            with suppress(OSError):
                write_tuning(bundle, Tuning(machine=machine, costs=known))
    return known
