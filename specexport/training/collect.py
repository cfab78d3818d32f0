"""Prompt files → the file of answers, through a bundle that is made for it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from specexport.errors import ConfigError
from specexport.export.build import BuildOptions, build
from specexport.export.methods import NoMethod
from specexport.runtime.engine import Engine
from specexport.runtime.options import EngineOptions
from specexport.training.answers import AnswerLimits, add_given, answer_questions
from specexport.training.disk import scratch
from specexport.training.given import read_given
from specexport.training.identity import TargetSource
from specexport.training.questions import Question, read_questions
from specexport.training.self_made import write_prompts

ANSWERS_NAME, PROMPTS_NAME = "answers.jsonl", "self-made.jsonl"
Tell = Callable[[str], None]
_TOLD_EVERY = 100


@dataclass(frozen=True, slots=True)
class CollectOptions:
    """Where answers come from."""

    prompts: tuple[Path, ...] = ()
    """Files whose prompts the target answers."""
    given: tuple[Path, ...] = ()
    """Files whose texts and answers are taken as they are."""
    num_self_made: int = 0
    """Prompts that the target writes itself."""
    limits: AnswerLimits = field(default_factory=AnswerLimits)
    max_length: int = 1024
    """Prompt and answer together."""
    max_slots: int = 32
    """Answers that are made at once."""
    num_threads: int = 0
    seed: int = 0
    """Of the prompts that the target writes."""

    def __post_init__(self) -> None:
        if not (self.prompts or self.given or self.num_self_made):
            raise ConfigError("There is nothing to learn from: give prompts, texts or self-made.")
        if self.limits.max_tokens >= self.max_length:
            raise ConfigError(
                f"Answers of {self.limits.max_tokens} tokens leave no room for a prompt in "
                f"{self.max_length}. Lower the one or raise the other."
            )


def collect_answers(
    target: str, folder: Path, options: CollectOptions, tell: Tell = lambda what: None
) -> Path:
    """Write what is missing of `folder`/answers.jsonl; its path.

    Raises `ConfigError` for a target or a file that does not fit.
    """
    model, path = TargetSource.open(target), folder / ANSWERS_NAME
    context = model.source.config.context_length
    options = replace(options, max_length=min(options.max_length, context))
    with _engine(model, folder, options) as engine:
        eos_token_ids = engine.manifest.eos_token_ids
        for file in options.given:
            given = read_given(file, engine.tokenizer, eos_token_ids, options.max_length)
            add_given(list(given), path, model.identity)
        questions = _questions(engine, folder, options)
        answers = answer_questions(engine, questions, path, model.identity, options.limits)
        for number, _ in enumerate(answers, start=1):
            if number % _TOLD_EVERY == 0:
                tell(f"{number} answers are written.")
    return path


def _questions(engine: Engine, folder: Path, options: CollectOptions) -> list[Question]:
    files = list(options.prompts)
    if options.num_self_made:
        files.append(folder / PROMPTS_NAME)
        write_prompts(engine, files[-1], options.num_self_made, options.seed)
    room = options.max_length - options.limits.max_tokens
    return [q for file in files for q in read_questions(file, engine.tokenizer, room)]


@contextmanager
def _engine(model: TargetSource, folder: Path, options: CollectOptions) -> Iterator[Engine]:
    """The target as it is, without speculation: many answers at once leave nothing to gain."""
    with scratch(folder / ".bundle") as bundle:
        checkpoint = model.source.checkpoint.source
        build(checkpoint, bundle, BuildOptions(NoMethod(), max_length=options.max_length))
        engine_options = EngineOptions(
            max_slots=options.max_slots, num_threads=options.num_threads, verify_files=False
        )
        with Engine(bundle, engine_options) as engine:
            yield engine
