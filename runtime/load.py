"""A bundle and options → the loop that runs it."""

from pathlib import Path

from specexport.engines.ort import OrtRunner
from specexport.engines.step import Profile
from specexport.errors import ConfigError
from specexport.export.manifest import DraftMethod, Manifest, Method, NgramMethod, SuffixMethod
from specexport.runtime.drafters.base import Drafter, NoDrafter
from specexport.runtime.drafters.draft_model import DraftModelDrafter
from specexport.runtime.drafters.ngram import NgramDrafter
from specexport.runtime.drafters.suffix import SuffixDrafter
from specexport.runtime.loop import SpeculativeLoop
from specexport.runtime.options import EngineOptions

_DEFAULTS: dict[str, Method] = {
    "ngram": NgramMethod(),
    "suffix": SuffixMethod(),
    "draft": DraftMethod(),
}


def load_loop(
    bundle: Path, manifest: Manifest, options: EngineOptions, max_length: int
) -> SpeculativeLoop:
    """Load target and drafter; raises `ConfigError` where the options do not fit the bundle."""
    k = _num_speculative_tokens(manifest, options)
    profile = Profile(
        max_slots=options.max_slots,
        max_length=max_length,
        max_query=max(options.prefill_chunk, k + 1),
        num_threads=options.num_threads,
    )
    target = OrtRunner(bundle / manifest.target.path, manifest.target, profile)
    try:
        drafter = _load_drafter(bundle, manifest, options, profile) if k else NoDrafter()
    except BaseException:
        target.close()
        raise
    return SpeculativeLoop(target, drafter, k, manifest.eos_token_ids)


def _num_speculative_tokens(manifest: Manifest, options: EngineOptions) -> int:
    if options.method == "none":
        if options.num_speculative_tokens:
            raise ConfigError(
                f"method is none, but num_speculative_tokens is {options.num_speculative_tokens}. "
                "Leave one of them out."
            )
        return 0
    if options.num_speculative_tokens is not None:
        return options.num_speculative_tokens
    return _method(manifest, options).num_speculative_tokens


def _method(manifest: Manifest, options: EngineOptions) -> Method:
    """The bundle's method, or the one asked for with its default values."""
    if options.method is None or options.method == manifest.method.kind:
        return manifest.method
    return _DEFAULTS[options.method]


def _load_drafter(
    bundle: Path, manifest: Manifest, options: EngineOptions, profile: Profile
) -> Drafter:
    method = _method(manifest, options)
    if isinstance(method, DraftMethod):
        if manifest.draft is None:
            raise ConfigError(
                f"{bundle} has no draft model. Build it with --draft MODEL, or use method ngram "
                "or suffix."
            )
        own = Profile(
            max_slots=profile.max_slots,
            max_length=min(profile.max_length, manifest.draft.max_length),
            max_query=profile.max_query,
            num_threads=profile.num_threads,
        )
        runner = OrtRunner(bundle / manifest.draft.path, manifest.draft, own)
        return DraftModelDrafter(runner, manifest.target.vocab_size)
    if isinstance(method, NgramMethod):
        return NgramDrafter(method.min_ngram, method.max_ngram)
    if isinstance(method, SuffixMethod):
        return SuffixDrafter(method.min_match, method.factor, method.store_tokens)
    raise ConfigError(
        f"{bundle} was built without a drafting method, so num_speculative_tokens has no "
        "effect. Choose method ngram or suffix, which need nothing built."
    )
