"""Which hidden states of the target an EAGLE-3 head reads: every producer's ids → `Tap`s.

Two ways of counting are published, and the same hidden state has a number one higher in the second:

- *outputs*: id i is the output of layer i, from 0. ModelOpt and SpecForge write these as
  `eagle_config.eagle_aux_hidden_state_layer_ids`, AngelSlim as `aux_hidden_states_layer_ids`;
  SGLang reads them so.
- *boundaries*: id i is what enters layer i: 0 is the embedding, num_layers the last layer's output.
  vLLM and speculators write these as `eagle_aux_hidden_state_layer_ids` at the top of the config.

Two things are stronger than the place where the ids stand, because real configs were converted
without renumbering: ids that are the reference's default triple in one of the two ways are that
triple, and an id equal to num_layers can be a boundary only.
"""

from collections.abc import Mapping
from typing import Any

from specexport.errors import CheckpointError
from specexport.export.manifest import Tap

OUTPUT, BOUNDARY = 0, -1
"""What is added to an id to get a `Tap`."""

_PLACES: tuple[tuple[tuple[str, ...], int], ...] = (
    (("eagle_config", "eagle_aux_hidden_state_layer_ids"), OUTPUT),
    (("eagle_aux_hidden_state_layer_ids",), BOUNDARY),
    (("aux_hidden_states_layer_ids",), OUTPUT),
)


def default_taps(num_layers: int) -> tuple[int, ...]:
    """The reference's: outputs of layers 1, n//2 - 1 and n - 4 (EAGLE-3, arXiv 2503.01840)."""
    return (1, num_layers // 2 - 1, num_layers - 4)


def read_taps(config: Mapping[str, Any], num_layers: int) -> tuple[Tap, ...]:
    """Taps of a head of a target with `num_layers`; `CheckpointError` for ids it does not have."""
    ids, offset, place = _find_ids(config)
    if ids is None:
        taps, told = default_taps(num_layers), "the default of EAGLE-3"
    else:
        offset = _counting(ids, offset, num_layers)
        taps, told = tuple(i + offset for i in ids), f"{place} = {ids}"
    # Loaders collect the states in the order of the layers, whatever the order of the ids.
    if list(taps) != sorted(set(taps)) or taps[0] < -1 or taps[-1] >= num_layers:
        raise CheckpointError(
            f"The head reads outputs of the target's layers {list(taps)} ({told}); the target has "
            f"layers 0 to {num_layers - 1}, and the list must rise. Is the head of this target?"
        )
    return taps


def _counting(ids: list[int], offset: int, num_layers: int) -> int:
    """How `ids` count: `offset`, unless they tell by themselves."""
    default = default_taps(num_layers)
    for candidate in (OUTPUT, BOUNDARY):
        if tuple(i + candidate for i in ids) == default:
            return candidate
    return BOUNDARY if num_layers in ids else offset


def _find_ids(config: Mapping[str, Any]) -> tuple[list[int] | None, int, str]:
    for path, offset in _PLACES:
        found: Any = config
        for key in path:
            found = found.get(key) if isinstance(found, dict) else None
        if not found:
            continue
        place = ".".join(path)
        if not isinstance(found, list) or not all(type(i) is int for i in found):
            raise CheckpointError(
                f"config.json of the head: {place} is {found!r}; expected layer numbers such as "
                "[2, 16, 29]."
            )
        return found, offset, place
    return None, OUTPUT, ""
