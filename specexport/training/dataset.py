"""Answers → a data set: the target's states in shards, written whole, going on after a kill.

Whoever calls `make_dataset` again on the same folder gets what is missing: shards that were not
written, shards that are damaged, and shards of answers that came later.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from specexport.errors import ConfigError
from specexport.export.heads.taps import default_taps
from specexport.export.manifest import FINAL_NORM, Tap, hash_file
from specexport.training.answers import read_answers
from specexport.training.disk import require_space, told_when_full, write_whole
from specexport.training.identity import TargetSource, require_same
from specexport.training.samples import (
    SPEC_NAME,
    DatasetSpec,
    Recipe,
    ShardEntry,
    ShardError,
    StateType,
    check_shard,
    read_spec,
)
from specexport.training.sequences import (
    ShardPlan,
    TrainingText,
    batches_by_length,
    plan_shards,
    read_texts,
    within_budget,
)
from specexport.training.teacher import Lesson, Teacher, open_teacher, teacher_profile

Tell = Callable[[str], None]

_STATE_TYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
_MAX_LENGTH = 1024
_ID_BYTES, _FLAG_BYTES, _TOP_BYTES = 4, 1, 8  # a token, whether it is learnt, one likely token


def taps_for(methods: Iterable[str], num_layers: int) -> tuple[Tap, ...]:
    """The states that heads of `methods` read or begin from; none for a draft model."""
    wanted = set(methods)
    taps: list[Tap] = []
    if "eagle3" in wanted:
        taps += default_taps(num_layers)
    if wanted & {"eagle3", "medusa", "mtp"}:
        taps.append(FINAL_NORM)
    return tuple(taps)


@dataclass(frozen=True, slots=True)
class DataOptions:
    """What a data set holds and how large it may be."""

    taps: tuple[Tap, ...] = (FINAL_NORM,)
    top_k: int = 64
    state_type: StateType = "fp16"
    max_length: int = _MAX_LENGTH
    """Longer sequences are cut."""
    budget_bytes: int | None = None
    """Sequences are taken until they fill it; None takes all."""
    shard_bytes: int = 128 * 10**6
    min_sequences: int = 50
    min_answer_tokens: int = 10_000
    num_threads: int = 0


def make_dataset(
    target: str,
    answers: Path,
    folder: Path,
    options: DataOptions = DataOptions(),
    tell: Tell = lambda what: None,
) -> DatasetSpec:
    """Write the data set of `answers` into `folder`, or what is missing of it.

    Raises `ConfigError` where the answers or the folder belong to another target, or the answers
    are too few, and `SpecExportError` where the disk is full.
    """
    model = TargetSource.open(target)
    texts, options = _read(model, answers, options, tell)
    spec = _describe(model, texts, options)
    token_bytes = _token_bytes(options, spec.hidden_size)
    plans = dict(enumerate(plan_shards(texts, token_bytes, options.shard_bytes)))
    with told_when_full(folder):
        folder.mkdir(parents=True, exist_ok=True)
    whole = _whole_shards(folder, spec, plans, tell)
    missing = {number: plan for number, plan in plans.items() if number not in whole}
    if missing:
        require_space(folder, sum(plan.num_tokens for plan in missing.values()) * token_bytes)
        profile = teacher_profile(options.max_length, options.num_threads)
        with open_teacher(model.source, options.taps, profile, folder) as teacher:
            for number, plan in missing.items():
                whole[number] = _write_shard(folder, number, plan, teacher, spec)
                _write_spec(folder, spec, whole)
                tell(f"Shard {number + 1} of {len(plans)} is written.")
    _remove_others(folder, plans)
    return _write_spec(folder, spec.model_copy(update={"is_complete": True}), whole)


def _read(
    model: TargetSource, answers: Path, options: DataOptions, tell: Tell
) -> tuple[list[TrainingText], DataOptions]:
    """The sequences that are taken, and the options as far as the target goes along."""
    config = model.source.config
    options = replace(
        options,
        max_length=min(options.max_length, config.context_length),
        top_k=min(options.top_k, config.vocab_size),
    )
    header, found = read_answers(answers)
    require_same(header.identity, model.identity, f"The file of answers {answers}")
    texts = read_texts(found, options.max_length, config.vocab_size)
    kept = within_budget(texts, _token_bytes(options, config.hidden_size), options.budget_bytes)
    if len(kept) < len(texts):
        tell(
            f"The budget of {options.budget_bytes} bytes holds {len(kept)} of {len(texts)} "
            "sequences; the others are left out."
        )
    _require_enough(kept, options)
    return kept, options


def _describe(
    model: TargetSource, texts: Sequence[TrainingText], options: DataOptions
) -> DatasetSpec:
    """The data set before it has shards."""
    config = model.source.config
    return DatasetSpec(
        identity=model.identity,
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        taps=options.taps,
        state_type=options.state_type,
        top_k=options.top_k,
        num_tokens=sum(len(text) for text in texts),
        num_answer_tokens=sum(text.num_answer_tokens for text in texts),
        recipe=Recipe(
            sources=dict(sorted(Counter(text.source for text in texts).items())),
            max_length=options.max_length,
            shard_bytes=options.shard_bytes,
            budget_bytes=options.budget_bytes,
        ),
        shards=(),
        is_complete=False,
    )


def _require_enough(texts: Sequence[TrainingText], options: DataOptions) -> None:
    num_tokens = sum(text.num_answer_tokens for text in texts)
    if len(texts) < options.min_sequences or num_tokens < options.min_answer_tokens:
        raise ConfigError(
            f"There are {len(texts)} sequences with {num_tokens} answer tokens; training needs at "
            f"least {options.min_sequences} with {options.min_answer_tokens}. Give more prompts "
            "or texts, or a larger --data-budget."
        )


def _token_bytes(options: DataOptions, hidden_size: int) -> int:
    states = 2 * hidden_size * len(options.taps)
    return _ID_BYTES + _FLAG_BYTES + states + _TOP_BYTES * options.top_k


def _whole_shards(
    folder: Path, spec: DatasetSpec, plans: Mapping[int, ShardPlan], tell: Tell
) -> dict[int, ShardEntry]:
    """Those of an earlier run that can stay; names those that are damaged.

    Raises `ConfigError` where the folder holds a data set of another kind.
    """
    if not (folder / SPEC_NAME).exists():
        return {}
    old = read_spec(folder, unfinished=True)
    require_same(old.identity, spec.identity, f"The data set {folder}")
    for name in ("taps", "state_type", "top_k"):
        was, wanted = getattr(old, name), getattr(spec, name)
        if was != wanted:
            raise ConfigError(
                f"The data set {folder} was made with {name} {was}, now {wanted} is wanted. Name "
                "another folder, or delete this one."
            )
    by_path = {shard.path: shard for shard in old.shards}
    whole = {}
    for number, plan in plans.items():
        shard = by_path.get(_shard_name(number))
        if shard is None or shard.sequences_sha256 != plan.sha256:
            continue
        try:
            check_shard(folder, shard)
        except ShardError as error:
            tell(f"{error} It is made again.")
        else:
            whole[number] = shard
    return whole


def _write_shard(
    folder: Path, number: int, plan: ShardPlan, teacher: Teacher, spec: DatasetSpec
) -> ShardEntry:
    from safetensors.torch import save

    path = folder / _shard_name(number)
    write_whole(path, save(_shard_tensors(plan, teacher, spec)))
    return ShardEntry(
        path=path.name,
        file=hash_file(path),
        sequences_sha256=plan.sha256,
        lengths=tuple(len(text) for text in plan.texts),
        held_out=tuple(i for i, text in enumerate(plan.texts) if text.is_held_out),
    )


def _shard_tensors(plan: ShardPlan, teacher: Teacher, spec: DatasetSpec) -> dict[str, torch.Tensor]:
    """All sequences one behind the other."""
    texts = plan.texts
    lessons: dict[int, Lesson] = {}
    for batch in batches_by_length(texts, teacher.batch_tokens, teacher.max_rows):
        found = teacher.explain([texts[number].token_ids for number in batch], spec.top_k)
        for number, lesson in zip(batch, found, strict=True):
            lessons[number] = replace(lesson, states=_stored(lesson.states, spec.state_type))
    ordered = [lessons[number] for number in range(len(texts))]
    return {
        "token_ids": torch.tensor([i for text in texts for i in text.token_ids]).int(),
        "is_answer": torch.cat([torch.from_numpy(text.is_answer) for text in texts]),
        "states": torch.cat([lesson.states for lesson in ordered]),
        "top_ids": torch.cat([lesson.top_ids for lesson in ordered]),
        "top_probs": torch.cat([lesson.top_probs for lesson in ordered]),
    }


def _stored(states: torch.Tensor, state_type: StateType) -> torch.Tensor:
    stored = states.to(_STATE_TYPES[state_type])
    if not torch.isfinite(stored).all():
        raise ConfigError(
            f"A hidden state does not fit {state_type} (largest magnitude "
            f"{float(states.abs().max()):g}). Store the states as bf16."
        )
    return stored


def _write_spec(folder: Path, spec: DatasetSpec, whole: dict[int, ShardEntry]) -> DatasetSpec:
    spec = spec.model_copy(update={"shards": tuple(whole[n] for n in sorted(whole))})
    write_whole(folder / SPEC_NAME, spec.model_dump_json(indent=1).encode() + b"\n")
    return spec


def _remove_others(folder: Path, plans: Mapping[int, ShardPlan]) -> None:
    """Shards of a larger data set that lay here before, and what killed runs left half-written."""
    names = {_shard_name(number) for number in plans}
    for path in folder.glob("shard-*.safetensors"):
        if path.name not in names:
            path.unlink()
    for path in folder.glob(".*.tmp"):
        path.unlink()


def _shard_name(number: int) -> str:
    return f"shard-{number:05d}.safetensors"
