"""The file of answers: what the target says to each question, kept as token ids.

Its first line says whose answers these are; each other line is an `Answer`. Texts that are given,
not generated, are lines of the same kind.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

from pydantic import ValidationError

from specexport.errors import ConfigError
from specexport.export.methods import Frozen
from specexport.runtime.engine import Engine
from specexport.runtime.params import SamplingParams
from specexport.training.identity import require_same
from specexport.training.lines import LineFile
from specexport.training.questions import Question, fraction
from specexport.training.samples import Identity
from specexport.training.window import Asked, in_order

_GREEDY_SHARE = 0.5
_TEMPERATURES = 0.7, 1.0

_Line = TypeVar("_Line", bound=Frozen)


class AnswersHeader(Frozen):
    """The first line."""

    schema_version: Literal[1] = 1
    identity: Identity


class Answer(Frozen):
    """A question and what follows it."""

    key: str
    """Of the question: decides what is held out."""
    source: str
    prompt_ids: tuple[int, ...]
    answer_ids: tuple[int, ...]
    """With the token that ends it, where it ended."""
    temperature: float | None = None
    """None: the text was given."""


@dataclass(frozen=True, slots=True)
class AnswerLimits:
    """When it is enough."""

    max_tokens: int = 256
    """Of one answer."""
    total_tokens: int | None = None
    """Of all answers together; None answers every question."""


def answer_questions(
    engine: Engine,
    questions: Sequence[Question],
    path: Path,
    identity: Identity,
    limits: AnswerLimits = AnswerLimits(),
) -> Iterator[Answer]:
    """Let the engine answer what is not answered yet, appending to `path`; each new answer.

    Half are greedy, the others drawn at a temperature from 0.7 to 1; which, and the seed, hang on
    the question's hash alone. Questions are asked in the order of their hashes, which mixes the
    sources. Raises `ConfigError` where `path` holds answers of another target.
    """
    with LineFile(path) as lines:
        answers = open_answers(lines, identity)
        known = {answer.key for answer in answers}
        total = sum(len(answer.answer_ids) for answer in answers)
        missing = sorted((q for q in questions if q.key not in known), key=lambda q: q.key)
        requests = (_asked(question, limits.max_tokens) for question in missing)
        answered = in_order(engine, requests)
        while limits.total_tokens is None or total < limits.total_tokens:
            found = next(answered, None)
            if found is None:
                return
            question, completion = found
            answer = Answer(
                key=question.key,
                source=question.source,
                prompt_ids=question.token_ids,
                answer_ids=completion.token_ids,
                temperature=_temperature(question.key),
            )
            lines.append(answer.model_dump_json())
            total += len(answer.answer_ids)
            yield answer


def add_given(answers: Iterable[Answer], path: Path, identity: Identity) -> None:
    """Append texts that are not there yet."""
    with LineFile(path) as lines:
        known = {answer.key for answer in open_answers(lines, identity)}
        for answer in answers:
            if answer.key not in known:
                known.add(answer.key)
                lines.append(answer.model_dump_json())


def open_answers(lines: LineFile, identity: Identity) -> list[Answer]:
    """The answers of an open file, whose header is written where there is none."""
    found = lines.read()
    if not found:
        lines.append(AnswersHeader(identity=identity).model_dump_json())
        return []
    header, answers = parse_answers(found, lines.path)
    require_same(header.identity, identity, f"The file of answers {lines.path}")
    return answers


def read_answers(path: Path) -> tuple[AnswersHeader, list[Answer]]:
    """The whole lines of a file that may still be growing; `ConfigError` where one is damaged."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}.") from None
    whole = data[: data.rfind(b"\n") + 1].decode("utf-8", errors="replace")
    return parse_answers(whole.split("\n")[:-1], path)


def parse_answers(lines: Sequence[str], path: Path) -> tuple[AnswersHeader, list[Answer]]:
    """Header and answers; raises `ConfigError` with the line that is damaged."""
    header = _parse(AnswersHeader, lines[0] if lines else "", path, 1)
    return header, [_parse(Answer, line, path, n) for n, line in enumerate(lines[1:], start=2)]


def _parse(kind: type[_Line], line: str, path: Path, number: int) -> _Line:
    try:
        return kind.model_validate_json(line)
    except ValidationError:
        raise ConfigError(
            f"{path}, line {number}: this is no line of a file of answers. Delete it, or make the "
            "answers again."
        ) from None


def _asked(question: Question, max_tokens: int) -> Asked[Question]:
    params = SamplingParams(
        temperature=_temperature(question.key),
        max_tokens=max_tokens,
        seed=int(question.key[:15], 16),
    )
    return question, question.token_ids, params


def _temperature(key: str) -> float:
    """0 for a half of all questions."""
    if fraction(key, "greedy") < _GREEDY_SHARE:
        return 0.0
    low, high = _TEMPERATURES
    return round(low + (high - low) * fraction(key, "temperature"), 3)
