"""Loading a bundle for a command that runs it."""

from pathlib import Path

from specexport.commands.common import console
from specexport.runtime.engine import Engine
from specexport.runtime.options import EngineOptions
from specexport.runtime.tuning import is_tuned


def open_engine(bundle: Path, options: EngineOptions) -> Engine:
    """Load with a word of what takes so long."""
    measures = options.is_adaptive and not is_tuned(bundle, options.num_threads)
    what = "Loading, and measuring once what steps cost on this machine" if measures else "Loading"
    with console.status(what):
        return Engine(bundle, options)
