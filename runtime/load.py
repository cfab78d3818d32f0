"""A bundle and options → the loop that runs it."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from specexport.engines.ort import OrtFunction, OrtRunner, usable_cpus
from specexport.engines.step import Profile
from specexport.errors import BundleError, ConfigError
from specexport.export.manifest import (
    DraftMethod,
    DynamicTreeSpec,
    GraphSpec,
    HeadMethod,
    HeadSpec,
    LookupMethod,
    LosslessAcceptance,
    Manifest,
    MedusaMethod,
    Method,
    NgramMethod,
    NoMethod,
    StaticTreeSpec,
    SuffixMethod,
)
from specexport.runtime.adaptive import AdaptiveLength, DraftShape
from specexport.runtime.costs import costs_of
from specexport.runtime.drafters.base import Drafter, NoDrafter
from specexport.runtime.drafters.constrained import Constrained
from specexport.runtime.drafters.first_of import FirstOf
from specexport.runtime.drafters.medusa import MedusaDrafter
from specexport.runtime.drafters.model import ModelDrafter
from specexport.runtime.drafters.ngram import NgramDrafter
from specexport.runtime.drafters.suffix import SuffixDrafter
from specexport.runtime.growth import DynamicTree, Grower, StaticTree, TokenMap
from specexport.runtime.loop import Policy, SpeculativeLoop
from specexport.runtime.options import EngineOptions

_LOOKUPS: dict[str, type[NgramMethod | SuffixMethod]] = {
    "ngram": NgramMethod,
    "suffix": SuffixMethod,
}


def load_loop(
    bundle: Path, manifest: Manifest, options: EngineOptions, max_length: int
) -> SpeculativeLoop:
    """Load target and drafter; raises `ConfigError` where the options do not fit the bundle."""
    method, lookup = _method(bundle, manifest, options), _lookup(manifest, options)
    grower = _grower(method, options)
    k = _depth(method, lookup, grower, options)
    max_nodes = max(k, grower.max_nodes if grower else 0)
    profile = Profile(
        max_slots=options.max_slots,
        max_length=max_length,
        max_query=_max_query(manifest.target, options.step_tokens + max_nodes, max_nodes),
        num_threads=options.num_threads,
        max_nodes=max_nodes,
    )
    target = OrtRunner(bundle / manifest.target.path, manifest.target, profile)
    loader = _Loader(bundle, manifest, profile, grower, is_adaptive=options.adaptive)
    try:
        drafter = loader.drafter(method, lookup if k else None)
        lengths = loader.lengths(target, k) if options.adaptive and k else None
    except BaseException:
        target.close()
        raise
    acceptance = (options.acceptance or manifest.acceptance) if k else LosslessAcceptance()
    policy = Policy(max_nodes, acceptance, lengths, options.prefix_cache_mb * 2**20)
    return SpeculativeLoop(target, drafter, k, manifest.eos_token_ids, policy)


def _max_query(spec: GraphSpec, wanted: int, max_nodes: int) -> int:
    """Query tokens of a row: no more than the graph has positions, and room for a whole draft."""
    if max_nodes + 1 > spec.max_length:
        raise ConfigError(
            f"Drafts have up to {max_nodes} tokens, but {spec.path} was built for "
            f"{spec.max_length} positions. Draft fewer (-k, --tree), or build with a larger "
            "--max-length."
        )
    return min(max(wanted, max_nodes + 1), spec.max_length)


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


class _Loader:
    """Opens the graphs of a bundle's drafter."""

    def __init__(
        self,
        bundle: Path,
        manifest: Manifest,
        profile: Profile,
        grower: Grower | None,
        *,
        is_adaptive: bool,
    ) -> None:
        self._bundle, self._manifest = bundle, manifest
        self._profile, self._grower = profile, grower
        self._is_adaptive = is_adaptive
        self._opened: OrtRunner | None = None

    def drafter(self, method: Method, lookup: LookupMethod | None) -> Drafter:
        """The method's drafter, after the lookup where there is one."""
        own = self._own(method)
        return FirstOf(self._own(lookup), own) if lookup else own

    def lengths(self, target: OrtRunner, k: int) -> AdaptiveLength:
        """Draft lengths up to `k` by what the graphs' steps cost."""
        runners = [target, self._opened] if self._opened else [target]
        costs = costs_of(self._bundle, runners, self._threads or usable_cpus())
        drafter = costs[self._opened.spec.path] if self._opened else None
        return AdaptiveLength(costs[target.spec.path], drafter, _shapes(self._grower, k))

    def _own(self, method: Method) -> Drafter:
        if isinstance(method, NgramMethod):
            return Constrained(NgramDrafter(method.min_ngram, method.max_ngram))
        if isinstance(method, SuffixMethod):
            factor, store_tokens = method.factor, method.store_tokens
            return Constrained(SuffixDrafter(method.min_match, factor, store_tokens))
        if isinstance(method, NoMethod):
            return NoDrafter()
        assert self._grower is not None
        manifest = self._manifest
        if isinstance(method, DraftMethod):
            assert manifest.draft is not None
            shared = TokenMap(min(manifest.target.vocab_size, manifest.draft.vocab_size))
            runner = self._runner(manifest.draft)
            return ModelDrafter(runner, self._grower, shared, is_certain=self._is_adaptive)
        assert manifest.head is not None
        if isinstance(method, MedusaMethod):
            return self._medusa(manifest.head)
        return self._head(manifest.head)

    def _head(self, head: HeadSpec) -> Drafter:
        assert head.step is not None
        assert self._grower is not None
        token_map = self._token_map(head) or TokenMap(head.step.vocab_size)
        fuse = OrtFunction(self._bundle / head.fuse.path, self._threads) if head.fuse else None
        runner = self._runner(head.step)
        return ModelDrafter(
            runner,
            self._grower,
            token_map,
            is_head=True,
            fuse=fuse,
            is_certain=self._is_adaptive,
        )

    def _medusa(self, head: HeadSpec) -> Drafter:
        assert head.medusa is not None
        assert isinstance(self._grower, StaticTree)
        num_heads = head.medusa.outputs[0].shape[1]
        assert isinstance(num_heads, int)
        if self._grower.depth > num_heads:
            raise ConfigError(
                f"Drafts of {self._grower.depth} tokens were asked for, but there are {num_heads} "
                f"Medusa heads, one for each position. Ask for at most {num_heads}."
            )
        heads = OrtFunction(self._bundle / head.medusa.path, self._threads)
        return Constrained(MedusaDrafter(heads, self._grower, self._token_map(head)))

    @property
    def _threads(self) -> int:
        return self._profile.num_threads

    def _runner(self, spec: GraphSpec) -> OrtRunner:
        own = Profile(
            max_slots=self._profile.max_slots,
            max_length=min(self._profile.max_length, spec.max_length),
            max_query=_max_query(spec, self._profile.max_query, self._profile.max_nodes),
            num_threads=self._threads,
            max_nodes=self._profile.max_nodes,
        )
        self._opened = OrtRunner(self._bundle / spec.path, spec, own)
        return self._opened

    def _token_map(self, head: HeadSpec) -> TokenMap | None:
        """None where the head predicts the target's ids themselves."""
        if head.token_map is None:
            return None
        path = self._bundle / head.token_map
        target_ids = _load_ids(path)
        sizes = head.vocab_size, self._manifest.target.vocab_size
        if (
            len(target_ids) != sizes[0]
            or target_ids.min() < 0
            or target_ids.max() >= sizes[1]
            or len(np.unique(target_ids)) != len(target_ids)
        ):
            raise BundleError(
                f"{path} must lead the head's {sizes[0]} ids to as many different ones of the "
                f"target, 0 to {sizes[1] - 1}; it holds {len(target_ids)}, from {target_ids.min()} "
                f"to {target_ids.max()}. Build the bundle again."
            )
        return TokenMap(len(target_ids), target_ids)


def _shapes(grower: Grower | None, k: int) -> list[DraftShape]:
    """What drafts of up to `k` tokens may look like: as the grower's, or chains."""
    if grower is None:
        return [DraftShape.chain(length) for length in range(1, k + 1)]
    growers = {grower.width: grower, 1: grower.narrowed(1)}.values()
    shapes = [g.shape(depth) for g in growers for depth in range(1, min(k, g.depth) + 1)]
    # Beyond the grower's depth only a lookup drafts, which takes no time.
    widths = (1,) * grower.depth
    return shapes + [DraftShape(n, n, widths) for n in range(grower.depth + 1, k + 1)]


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
