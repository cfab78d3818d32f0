"""The shapes that a plan takes, from what a bundle is to be loaded with.

Two profiles, since TensorRT is fastest near the middle of a narrow one:

| | rows | query tokens | rows with logits |
|---|---|---|---|
| step | 1 to slots | 1 to nodes + 1 | 1 to all |
| prefill | 1 to slots | 1 to chunk + nodes | 1 to all |

The decide graph has the first alone: what it decides on are drafts.

No dimension may be 0: a step without logits asks for one row of them.
"""

from dataclasses import dataclass

from specexport.errors import ConfigError
from specexport.export.engine_spec import CACHE_STEP, ShapeProfile, SizeRange
from specexport.export.manifest import AnySpec, DecideSpec, GraphSpec, Manifest, max_adjusted
from specexport.export.methods import DynamicTreeSpec, StaticTreeSpec
from specexport.export.tensorrt.form import CACHE_LENGTH


@dataclass(frozen=True, slots=True)
class Limits:
    """The largest step that the plan of one graph must take."""

    max_slots: int
    max_length: int
    """Tokens of text in a slot."""
    chunk: int
    """Prompt tokens of a row in one step."""
    max_nodes: int
    """Drafted tokens past the text of a row."""

    @classmethod
    def of(cls, manifest: Manifest, spec: GraphSpec, max_slots: int, chunk: int) -> "Limits":
        """Of one graph of the bundle; raises `ConfigError` where drafts do not fit into it."""
        nodes = max_nodes(manifest)
        if nodes + 1 > spec.max_length:
            raise ConfigError(
                f"Drafts have up to {nodes} tokens, but {spec.path} was built for "
                f"{spec.max_length} positions. Draft fewer, or build with a larger --max-length."
            )
        return cls(max_slots, spec.max_length, chunk, nodes)

    @property
    def max_query(self) -> int:
        """Most query tokens of a row: a chunk leaves room for a whole draft."""
        return min(self.chunk + self.max_nodes, self.max_length)

    @property
    def cache_length(self) -> int:
        """S: drafts end past the text, and rows that are shorter than the longest in padding.

        Of whole steps, so that each slot's part of a cache begins at an aligned address.
        """
        least = self.max_length + self.max_nodes + self.max_query
        return -(-least // CACHE_STEP) * CACHE_STEP


def max_nodes(manifest: Manifest) -> int:
    """Most drafted tokens of a row that the bundle's own method and lookup call for."""
    tree = getattr(manifest.method, "tree", None)
    nodes = manifest.method.num_speculative_tokens
    if isinstance(tree, StaticTreeSpec):
        nodes = len(tree.choices)
    elif isinstance(tree, DynamicTreeSpec):
        nodes = max(tree.num_nodes, tree.top_k * (tree.depth - 1))
    return max(nodes, manifest.lookup.num_speculative_tokens if manifest.lookup else 0)


def make_profiles(spec: AnySpec, limits: Limits) -> tuple[ShapeProfile, ...]:
    """The profiles of a graph; one where both would take the same shapes."""
    if isinstance(spec, DecideSpec):
        return (ShapeProfile(name="step", sizes=_decide(spec.vocab_size, limits)),)
    dims = {dim: None for tensor in spec.inputs for dim in tensor.shape if isinstance(dim, str)}
    step, prefill = (
        {dim: sizes[dim] for dim in dims if dim != CACHE_LENGTH}
        for sizes in (_step(limits), _prefill(limits))
    )
    same = all(step[dim].max == prefill[dim].max for dim in step)
    named = {"step": step} if same else {"step": step, "prefill": prefill}
    return tuple(ShapeProfile(name=name, sizes=sizes) for name, sizes in named.items())


def _step(limits: Limits) -> dict[str, SizeRange]:
    """Verification of whole drafts in all slots is what must be fast."""
    width = limits.max_nodes + 1
    rows = limits.max_slots * width
    return {
        **_both(limits),
        "query": _range(width, width),
        "num_logits": _range(rows, rows),
        "rows": _range(width, width),
    }


def _decide(vocab_size: int, limits: Limits) -> dict[str, SizeRange]:
    """Whole drafts in all slots; most requests change few logits, and most drafts are certain."""
    slots, places = limits.max_slots, limits.max_nodes + 1
    return {
        "positions": _range(slots * places, slots * places),
        "adjusted": _range(1, max_adjusted(vocab_size, limits.max_length)),
        "proposals": _range(1, vocab_size),
        "requests": _range(slots, slots),
        "places": _range(places, places),
    }


def _prefill(limits: Limits) -> dict[str, SizeRange]:
    """Long prompts run alone, and of a prompt the last row gets logits."""
    width = limits.max_query
    return {
        **_both(limits),
        "batch": _range(1, limits.max_slots),
        "query": _range(width, width),
        "num_logits": _range(1, limits.max_slots * width),
        "rows": _range(width, width),
    }


def _both(limits: Limits) -> dict[str, SizeRange]:
    length = limits.cache_length
    return {
        "batch": _range(limits.max_slots, limits.max_slots),
        "valid_length": _range((length + 1) // 2, length),
    }


def _range(best: int, most: int) -> SizeRange:
    return SizeRange(min=1, opt=best, max=most)
