"""A bundle and options → the loop that runs it."""

from pathlib import Path

from specexport.engines.ort import OrtRunner
from specexport.engines.step import Profile
from specexport.errors import ConfigError
from specexport.export.manifest import Manifest, NgramMethod
from specexport.runtime.drafters.base import Drafter, NoDrafter
from specexport.runtime.drafters.model import ModelDrafter
from specexport.runtime.drafters.ngram import NgramDrafter
from specexport.runtime.growth import StaticTree, TokenMap
from specexport.runtime.loop import SpeculativeLoop
from specexport.runtime.options import EngineOptions


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
        drafter = _load_drafter(bundle, manifest, options, profile, k) if k else NoDrafter()
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
    if options.method == "ngram" and manifest.method.kind != "ngram":
        return NgramMethod().num_speculative_tokens
    return manifest.method.num_speculative_tokens


def _load_drafter(
    bundle: Path, manifest: Manifest, options: EngineOptions, profile: Profile, k: int
) -> Drafter:
    kind = options.method or manifest.method.kind
    if kind == "draft":
        if manifest.draft is None:
            raise ConfigError(
                f"{bundle} has no draft model. Build it with --draft MODEL, or use method ngram."
            )
        own = Profile(
            max_slots=profile.max_slots,
            max_length=min(profile.max_length, manifest.draft.max_length),
            max_query=profile.max_query,
            num_threads=profile.num_threads,
        )
        runner = OrtRunner(bundle / manifest.draft.path, manifest.draft, own)
        shared = TokenMap(min(manifest.target.vocab_size, manifest.draft.vocab_size))
        return ModelDrafter(runner, StaticTree.chain(k), shared)
    if kind == "none":
        raise ConfigError(
            f"{bundle} was built without a drafting method, so num_speculative_tokens has no "
            "effect. Choose method ngram, which needs nothing built."
        )
    method = manifest.method if isinstance(manifest.method, NgramMethod) else NgramMethod()
    return NgramDrafter(method.min_ngram, method.max_ngram)
