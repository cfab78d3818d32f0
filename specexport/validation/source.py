"""Where the checkpoints lie that a bundle was built from."""

from pathlib import Path

from specexport.errors import ConfigError


def find_source(given: str | None, recorded: str, option: str) -> str:
    """`given`, else what the bundle recorded; `ConfigError` where that is not there any more."""
    if given is not None:
        return given
    is_hub_id = not Path(recorded).is_absolute()
    if is_hub_id or Path(recorded).exists():
        return recorded
    raise ConfigError(
        f"The bundle was built from {recorded}, which is not there any more. "
        f"Say where the checkpoint is with {option}."
    )
