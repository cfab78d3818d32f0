"""What a bundle is loaded to draft with: its own method, or what the options ask for instead."""

from dataclasses import dataclass
from pathlib import Path

from specexport.errors import ConfigError
from specexport.export.manifest import Manifest
from specexport.export.methods import (
    DraftMethod,
    DynamicTreeSpec,
    HeadMethod,
    LookupMethod,
    MedusaMethod,
    Method,
    NgramMethod,
    NoMethod,
    StaticTreeSpec,
    SuffixMethod,
)
from specexport.runtime.growth import DynamicTree, Grower, StaticTree
from specexport.runtime.options import EngineOptions

_LOOKUPS: dict[str, type[NgramMethod | SuffixMethod]] = {
    "ngram": NgramMethod,
    "suffix": SuffixMethod,
}


@dataclass(frozen=True, slots=True)
class Drafting:
    """A method with all that the options change of it."""

    method: Method
    lookup: LookupMethod | None
    """Asked first."""
    grower: StaticTree | DynamicTree | None
    """The shape of a model's or head's drafts."""
    depth: int
    """The draft length limit K."""

    @property
    def max_nodes(self) -> int:
        """Most tokens of a draft."""
        return max(self.depth, self.grower.max_nodes if self.grower else 0)


def choose_drafting(bundle: Path, manifest: Manifest, options: EngineOptions) -> Drafting:
    """Raises `ConfigError` where the options do not fit one another or the bundle."""
    method, lookup = _method(bundle, manifest, options), _lookup(manifest, options)
    grower = _grower(method, options)
    depth = _depth(method, lookup, grower, options)
    return Drafting(method, lookup if depth else None, grower, depth)


def _method(bundle: Path, manifest: Manifest, options: EngineOptions) -> Method:
    """The bundle's method, or the one that is asked for and needs nothing built."""
    kind, own = options.method, manifest.method
    if kind == "none" or options.num_speculative_tokens == 0:
        for name, value in (
            ("num_speculative_tokens", options.num_speculative_tokens or None),
            ("tree", options.tree),
            ("lookup", None if options.lookup == "none" else options.lookup),
        ):
            if value is not None:
                raise ConfigError(
                    f"{name} was given, but nothing is to be drafted (method none, or "
                    "num_speculative_tokens 0). Leave one of them out."
                )
        return NoMethod()
    if kind is None or kind == own.kind:
        if options.tree is None:
            return own
        if isinstance(own, DraftMethod | HeadMethod) or (
            isinstance(own, MedusaMethod) and isinstance(options.tree, StaticTreeSpec)
        ):
            return own.model_copy(update={"tree": options.tree})
        raise ConfigError(
            f"Method {own.kind} drafts no {options.tree.kind} tree. Leave the tree out"
            f"{', or give a static one' if isinstance(own, MedusaMethod) else ''}."
        )
    if kind in _LOOKUPS and options.tree is None:
        return _LOOKUPS[kind]()
    if kind in _LOOKUPS:
        raise ConfigError(f"Method {kind} drafts no trees. Leave the tree out.")
    how = "--draft MODEL" if kind == "draft" else f"--method {kind} --head PATH"
    what = "draft model" if kind == "draft" else f"{kind} head"
    raise ConfigError(
        f"{bundle} has no {what}. Build it with {how}, or use method ngram or suffix, which need "
        "nothing built."
    )


def _lookup(manifest: Manifest, options: EngineOptions) -> LookupMethod | None:
    if options.lookup is None:
        same = options.method in (None, manifest.method.kind)
        return manifest.lookup if same else None
    if options.lookup == "none":
        return None
    kind = options.method or manifest.method.kind
    if kind in _LOOKUPS or kind == "none":
        raise ConfigError(
            f"A lookup goes before a draft model or a head; method {kind} is none. Leave one of "
            "them out."
        )
    own = manifest.lookup
    return own if own and own.kind == options.lookup else _LOOKUPS[options.lookup]()


def _depth(
    method: Method, lookup: LookupMethod | None, grower: Grower | None, options: EngineOptions
) -> int:
    """The draft length limit K."""
    if isinstance(method, NoMethod):
        if options.method != "none" and options.num_speculative_tokens:
            raise ConfigError(
                "The bundle was built without a drafting method, so num_speculative_tokens has no "
                "effect. Choose method ngram or suffix, which need nothing built."
            )
        return 0
    if (limit := options.num_speculative_tokens) is not None:
        if grower and lookup is None and limit > grower.depth:
            raise ConfigError(
                f"num_speculative_tokens is {limit}, but the bundle's trees are {grower.depth} "
                "deep. Lower it, or give a deeper tree."
            )
        return limit
    own = grower.depth if grower else method.num_speculative_tokens
    return max(own, lookup.num_speculative_tokens) if lookup else own


def _grower(method: Method, options: EngineOptions) -> StaticTree | DynamicTree | None:
    if not isinstance(method, DraftMethod | HeadMethod | MedusaMethod):
        return None
    if method.tree:
        return _grow(method.tree)
    return StaticTree.chain(options.num_speculative_tokens or method.num_speculative_tokens)


def _grow(tree: StaticTreeSpec | DynamicTreeSpec) -> StaticTree | DynamicTree:
    if isinstance(tree, StaticTreeSpec):
        return StaticTree(tree.choices)
    return DynamicTree(tree.depth, tree.top_k, tree.num_nodes)
