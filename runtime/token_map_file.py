"""The file that leads a head's token ids to the target's."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from specexport.errors import BundleError
from specexport.runtime.token_map import TokenMap


def read_token_map(path: Path, vocab_size: int, target_vocab_size: int) -> TokenMap:
    """Raises `BundleError` unless each of a head's `vocab_size` ids has one of the target's."""
    target_ids = _load_ids(path)
    if (
        len(target_ids) != vocab_size
        or target_ids.min() < 0
        or target_ids.max() >= target_vocab_size
        or len(np.unique(target_ids)) != len(target_ids)
    ):
        raise BundleError(
            f"{path} must lead the head's {vocab_size} ids to as many different ones of the "
            f"target, 0 to {target_vocab_size - 1}; it holds {len(target_ids)}, from "
            f"{target_ids.min()} to {target_ids.max()}. Build the bundle again."
        )
    return TokenMap(len(target_ids), target_ids)


def _load_ids(path: Path) -> NDArray[np.int64]:
    """[V_draft], not empty; raises `BundleError` for a file of anything else."""
    try:
        found = np.load(path, mmap_mode="r")  # the header alone: its shape may be anything
    except Exception as error:  # a damaged file can raise nearly anything
        raise BundleError(
            f"{path} is no NumPy file ({type(error).__name__}). Build the bundle again."
        ) from None
    is_array = isinstance(found, np.ndarray)
    if not (is_array and found.ndim == 1 and found.size and found.dtype.kind in "iu"):
        what = f"{found.dtype} of shape {list(found.shape)}" if is_array else "an archive"
        raise BundleError(
            f"{path} holds {what}; expected token ids of one dimension. Build the bundle again."
        )
    return np.array(found, dtype=np.int64)
