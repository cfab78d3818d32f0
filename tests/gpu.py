"""Tests marked `gpu`: they run on a real GPU, and skip with the reason where there is none."""

from functools import cache

import pytest

from specexport.engines.available import EngineName, missing
from specexport.errors import ConfigError
from specexport.gpu import find_gpu


@cache
def why_no_gpu() -> str | None:
    """Why no GPU can be used here; None where one can."""
    try:
        find_gpu()
    except ConfigError as error:
        return str(error)
    return None


def skip_unless_available(engine: EngineName) -> None:
    """Skip where the GPU is there, but something that the engine needs is not."""
    if lack := missing(engine):
        pytest.skip(f"{engine}: {lack}")


def skip_without_gpu(item: pytest.Item) -> None:
    """Skip a test that is marked `gpu` where it cannot run."""
    if item.get_closest_marker("gpu") and (reason := why_no_gpu()):
        pytest.skip(reason)
