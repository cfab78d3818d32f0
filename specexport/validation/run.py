"""All of `validate`, in order: tokens three ways, sampling, logits; then the report."""

import json
import os
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path

import onnxruntime

from specexport.engines.available import EngineName
from specexport.engines.ort import OrtRunner
from specexport.engines.step import Profile
from specexport.errors import ConfigError
from specexport.export.engine_spec import FloatType
from specexport.export.manifest import GraphSpec, Manifest, read_manifest
from specexport.export.methods import LosslessAcceptance
from specexport.runtime.engine import Engine
from specexport.runtime.options import EngineOptions
from specexport.validation.dialect import check_dialect
from specexport.validation.distribution import compare_distribution
from specexport.validation.divergence import measure_divergence
from specexport.validation.engine_check import EngineCheck
from specexport.validation.greedy import compare_greedy, generate_greedy
from specexport.validation.head_check import HeadCheck
from specexport.validation.logits import compare_logits
from specexport.validation.reference import Reference
from specexport.validation.report import (
    KERNEL_KL,
    KERNEL_TOLERANCE,
    DivergenceReport,
    LogitsReport,
    ValidationReport,
)
from specexport.validation.rounding import rounded_reference
from specexport.validation.source import find_source

REPORT_NAME = "validation.json"
_TOLERANCE = 1e-3
_SLOTS = 8
# It repeats itself, so that an n-gram drafter has something to propose from the first token on.
_REPEATING = "one two three, one two three, one two"


@dataclass(frozen=True, slots=True)
class ValidationOptions:
    """How thoroughly to validate."""

    checkpoint: str | None = None
    """None: where the bundle was built from."""
    draft_checkpoint: str | None = None
    head_checkpoint: str | None = None
    num_prompts: int | None = None
    """None: all that ship with specexport."""
    max_tokens: int = 32
    num_samples: int = 600
    tolerance: float | None = None
    """Largest logit difference; None: 1e-3."""
    engine: EngineName = "onnxruntime"
    """Another one is compared with ONNX Runtime's CPU provider, or built ahead of time."""
    gpus: tuple[str, ...] = ()
    """To build plans for; none: the GPU here, or those that the bundle has plans for."""
    precision: FloatType | None = None
    """Of plans; None: as `build` chooses."""


def validate(
    bundle: Path,
    options: ValidationOptions = ValidationOptions(),
    progress: Callable[[str], None] = lambda what: None,
) -> ValidationReport:
    """Measure `bundle` against PyTorch and write `validation.json` into it."""
    manifest = read_manifest(bundle)
    check = _engine_check(bundle, options)
    source = find_source(options.checkpoint, manifest.provenance.checkpoint, "--checkpoint")
    progress("Loading the checkpoint in PyTorch")
    reference = rounded_reference(source, manifest.target)
    tolerance = options.tolerance or _TOLERANCE
    is_exact = manifest.target.computes_in_fp32

    progress("Generating without speculation")
    with Engine(bundle, EngineOptions(max_slots=_SLOTS, method="none")) as engine:
        prompts = _prompts(engine, options)
        plain = generate_greedy(engine, prompts, options.max_tokens)
    progress("Generating with speculation")
    # Another rule of acceptance than the lossless one has no promise that could be checked.
    # Nor would drafts that do not pay be seen, if their sizes were adaptive.
    lossless = EngineOptions(
        max_slots=_SLOTS, adaptive=False, acceptance=LosslessAcceptance(), verify_files=False
    )
    with Engine(bundle, lossless) as engine:
        speculative = generate_greedy(engine, prompts, options.max_tokens)
        acceptance = engine.stats().acceptance
        progress("Sampling with speculation")
        repeating = engine.tokenizer.encode(_REPEATING)
        # A head drafts from the second token on: with four, some of its drafts have two.
        length = 4 if manifest.head else 3
        distribution = compare_distribution(
            reference, engine, repeating, options.num_samples, length
        )
    progress("Generating in PyTorch")
    outputs = {
        "PyTorch": [
            reference.greedy(prompt, options.max_tokens, manifest.eos_token_ids)
            for prompt in prompts
        ],
        "plain": plain,
        "speculative": speculative,
    }
    top2_tolerance = tolerance if is_exact else max(tolerance, KERNEL_TOLERANCE)
    greedy = compare_greedy(reference, prompts, outputs, acceptance, top2_tolerance)

    progress("Comparing logits")
    texts = [[*prompt, *output] for prompt, output in zip(prompts, plain, strict=True)]
    target = _compare(bundle, manifest.target, reference, texts, tolerance)
    progress("Comparing the drafter's logits")
    checked = HeadCheck(bundle, manifest, source, options.head_checkpoint, tolerance)
    head, head_not_compared = checked.run(reference, texts)
    progress("Comparing the distributions")
    kernels = None if is_exact else _diverge(bundle, manifest.target, reference, prompts)
    del reference
    loss = None
    if manifest.target.is_rounded:
        loss = _diverge(bundle, manifest.target, Reference(source), prompts)
    draft = _validate_draft(bundle, manifest, options, texts)
    dialect = check_dialect(bundle, manifest)
    engine_report = None
    if check is not None:
        progress(f"Comparing the outputs of {options.engine}, or building it")
        engine_report = check.run(texts)
    tests = (target, draft, head, greedy, distribution, dialect, engine_report)
    report = ValidationReport(
        passed=all(test.passed for test in tests if test is not None)
        and (kernels is None or kernels.mean_kl <= KERNEL_KL),
        num_prompts=len(prompts),
        max_abs_logit_diff=target.max_abs_diff,
        top1_agreement=target.top1_agreement,
        greedy_identical=greedy.identical,
        distribution_test=distribution,
        target=target,
        draft=draft,
        head=head,
        head_not_compared=head_not_compared,
        kernels=kernels,
        loss=loss,
        greedy=greedy,
        tensorrt=dialect,
        engine=engine_report,
        method=manifest.method.kind,
        num_speculative_tokens=manifest.method.num_speculative_tokens,
        acceptance=manifest.acceptance.kind,
        checkpoint=source,
        rounded_to=manifest.target.stored_as if manifest.target.is_rounded else None,
        machine=f"{platform.machine()}, {os.cpu_count()} CPUs",
        versions={
            "onnxruntime": onnxruntime.__version__,
            **{name: version(name) for name in ("torch", "transformers")},
        },
    )
    _write(bundle / REPORT_NAME, report)
    return report


def _engine_check(bundle: Path, options: ValidationOptions) -> EngineCheck | None:
    """Made first, so that what cannot be proved here is refused before the long part."""
    if options.engine == "onnxruntime":
        if options.gpus or options.precision:
            raise ConfigError("--gpu and --precision are for plans of TensorRT: give --engine.")
        return None
    return EngineCheck.of(bundle, options.engine, options.gpus, options.precision)


def _validate_draft(
    bundle: Path, manifest: Manifest, options: ValidationOptions, texts: Sequence[Sequence[int]]
) -> LogitsReport | None:
    """A correct verifier hides a broken drafter, so the draft model's logits are compared too."""
    if manifest.draft is None:
        return None
    recorded = manifest.provenance.draft_checkpoint or ""
    source = find_source(options.draft_checkpoint, recorded, "--draft-checkpoint")
    known = [
        [i for i in text if i < manifest.draft.vocab_size][: manifest.draft.max_length]
        for text in texts
    ]
    reference = rounded_reference(source, manifest.draft)
    return _compare(bundle, manifest.draft, reference, known, options.tolerance or _TOLERANCE)


def _compare(
    bundle: Path,
    spec: GraphSpec,
    reference: Reference,
    texts: Sequence[Sequence[int]],
    tolerance: float,
) -> LogitsReport:
    """fp32 against fp32: integer weights are multiplied out, for else kernels would be compared."""
    profile = Profile(max_slots=1, max_length=spec.max_length, dequantize=True)
    with OrtRunner(bundle / spec.path, spec, profile) as runner:
        return compare_logits(reference, runner, texts, tolerance)


def _diverge(
    bundle: Path, spec: GraphSpec, reference: Reference, texts: Sequence[Sequence[int]]
) -> DivergenceReport:
    """The bundle as it runs."""
    profile = Profile(max_slots=1, max_length=spec.max_length)
    with OrtRunner(bundle / spec.path, spec, profile) as runner:
        return measure_divergence(reference, runner, texts)


def _prompts(engine: Engine, options: ValidationOptions) -> list[list[int]]:
    """The shipped prompts, cut to leave room for the output."""
    lines = files("specexport.validation").joinpath("prompts.jsonl").read_text().splitlines()
    room = engine.max_length - options.max_tokens
    if room < 1:
        raise ConfigError(
            f"The bundle holds {engine.max_length} tokens; --max-tokens {options.max_tokens} "
            "leaves none for a prompt. Lower it."
        )
    texts = [json.loads(line)["text"] for line in lines[: options.num_prompts]]
    return [engine.tokenizer.encode(text)[:room] for text in texts]


def _write(path: Path, report: ValidationReport) -> None:
    temporary = path.with_suffix(".tmp")
    temporary.write_text(report.model_dump_json(indent=2) + "\n")
    temporary.replace(path)
