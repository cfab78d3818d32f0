"""A bundle and options → the loop that runs it."""

from dataclasses import replace
from functools import partial
from pathlib import Path

from specexport.engines.backend import Backend, open_backend
from specexport.engines.step import Profile, StepRunner
from specexport.errors import ConfigError
from specexport.export.manifest import GraphSpec, HeadSpec, Manifest
from specexport.export.methods import (
    DraftMethod,
    LosslessAcceptance,
    MedusaMethod,
    Method,
    NgramMethod,
    NoMethod,
    SuffixMethod,
)
from specexport.runtime.adaptive import AdaptiveLength, DraftShape
from specexport.runtime.drafters.base import Drafter, NoDrafter
from specexport.runtime.drafters.constrained import Constrained
from specexport.runtime.drafters.first_of import FirstOf
from specexport.runtime.drafters.medusa import MedusaDrafter
from specexport.runtime.drafters.model import ModelDrafter
from specexport.runtime.drafters.ngram import NgramDrafter
from specexport.runtime.drafters.suffix import SuffixDrafter
from specexport.runtime.drafting import Drafting, choose_drafting
from specexport.runtime.growth import Grower, StaticTree
from specexport.runtime.loop import Policy, SpeculativeLoop
from specexport.runtime.measuring import is_typical, measure_costs, measure_function
from specexport.runtime.options import EngineOptions
from specexport.runtime.picking import drawn, raced
from specexport.runtime.token_map import TokenMap
from specexport.runtime.token_map_file import read_token_map
from specexport.runtime.tuning import Measure, costs_of


def load_loop(
    bundle: Path, manifest: Manifest, options: EngineOptions, max_length: int
) -> SpeculativeLoop:
    """Load target and drafter; raises `ConfigError` where the options do not fit the bundle."""
    if options.decide_in_graph and manifest.decide is None:
        raise ConfigError(
            f"decide_in_graph is True, but {bundle} has no decide graph. Build the bundle again."
        )
    drafting = choose_drafting(bundle, manifest, options)
    max_nodes = drafting.max_nodes
    profile = Profile(
        max_slots=options.max_slots,
        max_length=max_length,
        max_query=_max_query(manifest.target, options.step_tokens + max_nodes, max_nodes),
        max_nodes=max_nodes,
        decides=options.decide_in_graph,
    )
    backend = open_backend(options.engine, bundle, manifest, options.num_threads)
    target = backend.runner("target", profile)
    acceptance = options.acceptance or manifest.acceptance
    is_lossless = isinstance(acceptance, LosslessAcceptance)
    is_adaptive = drafting.depth > 0 and (options.adaptive or (options.is_adaptive and is_lossless))
    loader = _Loader(bundle, manifest, backend, profile, drafting, is_adaptive=is_adaptive)
    try:
        drafter = loader.drafter()
        lengths = loader.lengths(target) if is_adaptive else None
    except BaseException:
        target.close()
        raise
    policy = Policy(
        max_nodes=max_nodes,
        acceptance=acceptance if drafting.depth else LosslessAcceptance(),
        lengths=lengths,
        max_prefix_bytes=options.prefix_cache_mb * 2**20,
    )
    return SpeculativeLoop(target, drafter, drafting.depth, manifest.eos_token_ids, policy)


def _max_query(spec: GraphSpec, wanted: int, max_nodes: int) -> int:
    """Query tokens of a row: no more than the graph has positions, and room for a whole draft."""
    if max_nodes + 1 > spec.max_length:
        raise ConfigError(
            f"Drafts have up to {max_nodes} tokens, but {spec.path} was built for "
            f"{spec.max_length} positions. Draft fewer (-k, --tree), or build with a larger "
            "--max-length."
        )
    return min(max(wanted, max_nodes + 1), spec.max_length)


class _Loader:
    """Opens the graphs of a bundle's drafter."""

    def __init__(
        self,
        bundle: Path,
        manifest: Manifest,
        backend: Backend,
        profile: Profile,
        drafting: Drafting,
        *,
        is_adaptive: bool,
    ) -> None:
        self._bundle, self._manifest, self._backend = bundle, manifest, backend
        self._profile, self._drafting = profile, drafting
        self._make_picker = raced if is_adaptive else drawn
        self._measures: dict[str, Measure] = {}  # of the drafter's graph, by its path

    def drafter(self) -> Drafter:
        """The method's drafter, after the lookup where there is one."""
        own, lookup = self._own(self._drafting.method), self._drafting.lookup
        return FirstOf(self._own(lookup), own) if lookup else own

    def lengths(self, target: StepRunner) -> AdaptiveLength:
        """Draft lengths by what the graphs' steps cost."""
        own = {target.spec.path: partial(measure_costs, target)}
        measures, machine = own | self._measures, self._backend.machine
        costs = costs_of(self._bundle, measures, machine, is_kept=is_typical(target))
        drafter = next((costs[path] for path in self._measures), None)
        return AdaptiveLength(costs[target.spec.path], drafter, _shapes(self._drafting))

    def _own(self, method: Method) -> Drafter:
        if isinstance(method, NgramMethod):
            return Constrained(NgramDrafter(method.min_ngram, method.max_ngram))
        if isinstance(method, SuffixMethod):
            factor, store_tokens = method.factor, method.store_tokens
            return Constrained(SuffixDrafter(method.min_match, factor, store_tokens))
        if isinstance(method, NoMethod):
            return NoDrafter()
        manifest, grower = self._manifest, self._drafting.grower
        assert grower is not None
        if isinstance(method, DraftMethod):
            assert manifest.draft is not None
            shared = TokenMap(min(manifest.target.vocab_size, manifest.draft.vocab_size))
            runner = self._runner("draft", manifest.draft)
            return ModelDrafter(runner, grower, shared, make_picker=self._make_picker)
        assert manifest.head is not None
        if isinstance(method, MedusaMethod):
            return self._medusa(manifest.head)
        return self._head(manifest.head, grower)

    def _head(self, head: HeadSpec, grower: Grower) -> Drafter:
        assert head.step is not None
        token_map = self._token_map(head) or TokenMap(head.step.vocab_size)
        fuse = self._backend.function("fuse") if head.fuse else None
        runner = self._runner("head", head.step)
        return ModelDrafter(
            runner,
            grower,
            token_map,
            is_head=True,
            fuse=fuse,
            make_picker=self._make_picker,
        )

    def _medusa(self, head: HeadSpec) -> Drafter:
        grower = self._drafting.grower
        assert head.medusa is not None
        assert isinstance(grower, StaticTree)
        num_heads, width = head.medusa.outputs[0].shape[1], head.medusa.inputs[0].width
        assert isinstance(num_heads, int)
        if grower.depth > num_heads:
            raise ConfigError(
                f"Drafts of {grower.depth} tokens were asked for, but there are {num_heads} "
                f"Medusa heads, one for each position. Ask for at most {num_heads}."
            )
        heads = self._backend.function("medusa")
        self._measures[head.medusa.path] = partial(measure_function, heads, width)
        return Constrained(MedusaDrafter(heads, grower, self._token_map(head)))

    def _token_map(self, head: HeadSpec) -> TokenMap | None:
        """None where the head predicts the target's ids themselves."""
        if head.token_map is None:
            return None
        sizes = head.vocab_size, self._manifest.target.vocab_size
        return read_token_map(self._bundle / head.token_map, *sizes)

    def _runner(self, name: str, spec: GraphSpec) -> StepRunner:
        own = Profile(
            max_slots=self._profile.max_slots,
            max_length=min(self._profile.max_length, spec.max_length),
            max_query=_max_query(spec, self._profile.max_query, self._profile.max_nodes),
            max_nodes=self._profile.max_nodes,
        )
        runner = self._backend.runner(name, own)
        self._measures[spec.path] = partial(measure_costs, runner)
        return runner


def _shapes(drafting: Drafting) -> list[DraftShape]:
    """What drafts may look like: as the grower's, or chains."""
    grower, k = drafting.grower, drafting.depth
    if grower is None:
        return [DraftShape.chain(length) for length in range(1, k + 1)]
    growers = {grower.width: grower, 1: grower.narrowed(1)}.values()
    shapes = [g.shape(depth) for g in growers for depth in range(1, min(k, g.depth) + 1)]
    # Beyond the grower's depth only a lookup drafts, which takes no time.
    widths = (1,) * grower.depth
    shapes += [DraftShape(n, n, widths) for n in range(grower.depth + 1, k + 1)]
    if isinstance(drafting.method, MedusaMethod):  # all heads at once
        return [replace(shape, widths=(1,)) for shape in shapes]
    return shapes
