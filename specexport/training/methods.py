"""The methods that heads are trained for: a new one is a module and an entry here."""

from collections.abc import Callable
from dataclasses import dataclass

from specexport.errors import ConfigError
from specexport.export.manifest import FINAL_NORM, Tap
from specexport.training.drafter import Drafter
from specexport.training.eagle3 import Eagle3
from specexport.training.head_start import HeadStart
from specexport.training.lender import Lender
from specexport.training.medusa import Medusa
from specexport.training.mtp import Mtp

_DATA_ADVICE = "Make the data set again, for this method."


@dataclass(frozen=True, slots=True)
class TrainMethod:
    """How a head is made."""

    taps: Callable[[tuple[Tap, ...]], tuple[Tap, ...]]
    """From those that a data set holds, the target's states that the head reads."""
    make: Callable[[Lender, HeadStart], Drafter]


def _layer_taps(taps: tuple[Tap, ...]) -> tuple[Tap, ...]:
    if found := tuple(tap for tap in taps if tap != FINAL_NORM):
        return found
    raise ConfigError(f"The data set holds no states between layers. {_DATA_ADVICE}")


def _final_tap(taps: tuple[Tap, ...]) -> tuple[Tap, ...]:
    if FINAL_NORM in taps:
        return (FINAL_NORM,)
    raise ConfigError(f"The data set lacks the states after the final norm. {_DATA_ADVICE}")


METHODS = {
    "eagle3": TrainMethod(_layer_taps, Eagle3),
    "medusa": TrainMethod(_final_tap, Medusa),
    "mtp": TrainMethod(_final_tap, Mtp),
}
