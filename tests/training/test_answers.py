"""Prompts and answers: what the target says, in a file that goes on after a kill."""

import errno
import gzip
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from specexport.errors import ConfigError, RequestError, SpecExportError
from specexport.runtime.engine import Engine
from specexport.runtime.options import EngineOptions
from specexport.runtime.output import Completion
from specexport.runtime.params import SamplingParams
from specexport.runtime.request import FinishReason
from specexport.runtime.stats import RequestStats
from specexport.runtime.tokenizer import Tokenizer
from specexport.training import self_made
from specexport.training.answers import AnswerLimits, answer_questions, read_answers
from specexport.training.collect import CollectOptions, collect_answers
from specexport.training.dataset import DataOptions, make_dataset
from specexport.training.given import read_given
from specexport.training.identity import TargetSource
from specexport.training.lines import LineFile
from specexport.training.questions import Question, key_of, passages, read_questions
from specexport.training.samples import Dataset, Identity
from tests.tiny import EOS_ID

IDENTITY = Identity(target="t" * 64, tokenizer="k" * 64)
LIMITS = AnswerLimits(max_tokens=8)


@pytest.fixture(scope="module")
def engine(tiny_bundle: Path) -> Iterator[Engine]:
    with Engine(tiny_bundle, EngineOptions(max_slots=4, method="none", num_threads=1)) as engine:
        yield engine


@pytest.fixture(scope="module")
def tokenizer(tiny_bundle: Path) -> Tokenizer:
    return Tokenizer(tiny_bundle / "tokenizer")


def questions(num: int) -> list[Question]:
    return [Question("a.txt", (256, number % 200, number // 200, 7)) for number in range(num)]


class Killed(BaseException):
    """What a kill is to the code: nothing that it may catch."""


def test_answers_are_what_the_engine_gives_and_half_are_greedy(
    engine: Engine, tmp_path: Path
) -> None:
    asked = questions(60)
    list(answer_questions(engine, asked, tmp_path / "a.jsonl", IDENTITY, LIMITS))
    header, answers = read_answers(tmp_path / "a.jsonl")
    assert header.identity == IDENTITY
    assert {answer.prompt_ids for answer in answers} == {q.token_ids for q in asked}
    greedy = [answer for answer in answers if answer.temperature == 0]
    assert 15 <= len(greedy) <= 45  # 30 ± 4 standard deviations
    assert all(0.7 <= (a.temperature or 0) <= 1 for a in answers if a not in greedy)
    for answer in greedy[:5]:
        expected = engine.submit(answer.prompt_ids, SamplingParams(max_tokens=8)).result()
        assert answer.answer_ids == expected.token_ids


def test_answers_are_made_once(engine: Engine, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    assert len(list(answer_questions(engine, questions(5), path, IDENTITY, LIMITS))) == 5
    new = list(answer_questions(engine, questions(7), path, IDENTITY, LIMITS))
    assert {answer.prompt_ids for answer in new} == {q.token_ids for q in questions(7)[5:]}


@pytest.mark.parametrize("number", range(0, 9, 2))
def test_a_run_that_is_killed_in_a_line_goes_on_to_the_same_file(
    number: int, engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, path, append, count = tmp_path / "whole", tmp_path / "killed", LineFile.append, 0
    asked = questions(8)
    list(answer_questions(engine, asked, whole, IDENTITY, LIMITS))

    def killed(lines: LineFile, line: str) -> None:
        nonlocal count
        count += 1
        if count > number:
            with path.open("a") as file:
                file.write(line[: len(line) // 2])
            raise Killed
        append(lines, line)

    with monkeypatch.context() as patch:
        patch.setattr(LineFile, "append", killed)
        with pytest.raises(Killed):
            list(answer_questions(engine, asked, path, IDENTITY, LIMITS))
    list(answer_questions(engine, reversed_(asked), path, IDENTITY, LIMITS))
    assert path.read_bytes() == whole.read_bytes()


def reversed_(asked: Sequence[Question]) -> list[Question]:
    return list(reversed(asked))


def test_answers_end_when_there_are_enough_tokens(engine: Engine, tmp_path: Path) -> None:
    limits = AnswerLimits(max_tokens=8, total_tokens=50)
    answers = list(answer_questions(engine, questions(100), tmp_path / "a.jsonl", IDENTITY, limits))
    total = sum(len(answer.answer_ids) for answer in answers)
    assert 50 <= total < 58
    assert not list(
        answer_questions(engine, questions(100), tmp_path / "a.jsonl", IDENTITY, limits)
    )


def test_answers_of_another_target_are_refused(engine: Engine, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    list(answer_questions(engine, questions(2), path, IDENTITY, LIMITS))
    other = Identity(target="u" * 64, tokenizer="k" * 64)
    with pytest.raises(ConfigError, match=r"another target: its SHA-256 is tttt.*uuuu"):
        list(answer_questions(engine, questions(3), path, other, LIMITS))


def test_a_damaged_line_is_named(engine: Engine, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    list(answer_questions(engine, questions(3), path, IDENTITY, LIMITS))
    lines = path.read_text().split("\n")
    lines[2] = lines[2][:-9]
    path.write_text("\n".join(lines))
    with pytest.raises(ConfigError, match="line 3: this is no line"):
        read_answers(path)
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        read_answers(tmp_path / "none.jsonl")


def test_a_full_disk_leaves_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    with LineFile(path) as lines:
        lines.append("first")
        file = lines._file

        class Full:
            """Takes a few bytes, then nothing."""

            def __init__(self) -> None:
                self.seek, self.truncate = file.seek, file.truncate

            def write(self, data: bytes) -> int:
                if len(data) < 5:
                    raise OSError(errno.ENOSPC, "No space left on device")
                return file.write(data[:3])

        lines._file = Full()  # type: ignore[assignment]
        with pytest.raises(SpecExportError, match=r"disk is full.*lines"):
            lines.append("second line")
        lines._file = file
        assert path.read_text() == "first\n"
        lines.append("second\u2028line")
        assert lines.read() == ["first", "second\u2028line"]


class ScriptedEngine:
    """Says at each seed what the seed decides; some of it is no prompt."""

    def __init__(self) -> None:
        self.tokenizer = self
        self.seeds: list[int] = []

    def encode_user_opening(self) -> list[int]:
        return [1, 2, 3]

    def submit(self, prompt: Sequence[int], params: SamplingParams) -> "ScriptedEngine":
        assert list(prompt) == [1, 2, 3]
        assert params.temperature == 1
        script = ScriptedEngine()
        script.seeds = [params.seed]
        self.seeds.append(params.seed)
        return script

    def result(self) -> Completion:
        seed = self.seeds[0]
        text = f"  What is {seed % 1000} and why?\n"
        text = {0: "Too short", 1: "This ends with half a \ufffd", 2: "What IS  the same?"}.get(
            seed % 7, text
        )
        reason = FinishReason.LENGTH if seed % 7 == 3 else FinishReason.STOP
        return Completion(text, (), reason, RequestStats())

    def __enter__(self) -> "ScriptedEngine":
        return self

    def __exit__(self, *_: object) -> None: ...

    def cancel(self) -> None: ...


def test_prompts_of_the_targets_own_making_are_whole_and_different(tmp_path: Path) -> None:
    path, engine = tmp_path / "p.jsonl", ScriptedEngine()
    self_made.write_prompts(engine, path, 30, seed=5)  # type: ignore[arg-type]
    entries = [json.loads(line) for line in path.read_text().splitlines()]
    texts = [entry["prompt"] for entry in entries]
    assert len(texts) == len(set(texts)) == 30
    assert sum(text == "What IS  the same?" for text in texts) == 1
    assert all(text.startswith("What ") and text.endswith("?") for text in texts)
    numbers = [entry["number"] for entry in entries]
    assert numbers == sorted(numbers)
    seeds = [int(text.split()[2]) for text in texts if "why" in text]
    drawn = {seed % 1000 for seed in engine.seeds if seed % 7 not in (0, 1, 2, 3)}
    assert set(seeds) <= drawn


@pytest.mark.parametrize("number", [1, 2, 17, 29])
def test_prompts_go_on_after_a_kill_to_the_same_file(number: int, tmp_path: Path) -> None:
    whole, path = tmp_path / "whole.jsonl", tmp_path / "p.jsonl"
    self_made.write_prompts(ScriptedEngine(), whole, 30)  # type: ignore[arg-type]
    lines = whole.read_text().split("\n")
    path.write_text("\n".join([*lines[:number], lines[number][:9]]))
    self_made.write_prompts(ScriptedEngine(), path, 30)  # type: ignore[arg-type]
    assert path.read_bytes() == whole.read_bytes()
    self_made.write_prompts(ScriptedEngine(), path, 20)  # type: ignore[arg-type]
    assert path.read_bytes() == whole.read_bytes()


def test_the_users_turn_opens_as_the_template_has_it(tokenizer: Tokenizer, tmp_path: Path) -> None:
    assert tokenizer.encode_user_opening() == [256, *tokenizer.encode("user: ")]
    (tmp_path / "tokenizer.json").write_bytes(
        Path(tokenizer_file(tokenizer, tmp_path)).read_bytes()
    )
    with pytest.raises(RequestError, match="no chat template"):
        Tokenizer(tmp_path).encode_user_opening()
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}")
    with pytest.raises(RequestError, match="does not show what a user says"):
        Tokenizer(tmp_path).encode_user_opening()


def tokenizer_file(tokenizer: Tokenizer, folder: Path) -> str:
    path = folder / "copy.json"
    tokenizer._tokenizer.save(str(path))
    return str(path)


def write_lines(path: Path, *values: Any) -> Path:
    text = "".join(json.dumps(value) + "\n" for value in values)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


def chat(*turns: str) -> dict[str, Any]:
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[i % 2], "content": t} for i, t in enumerate(turns)]}


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_questions_come_from_prompts_and_conversations(
    name: str, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    path = write_lines(
        tmp_path / name,
        {"prompt": "Hello", "task_id": 7},
        chat("Hello"),  # the same question
        chat("Hello", "Hi", "Bye", "left out"),
        {"prompt": "x" * 100},  # too long
    )
    found = read_questions(path, tokenizer, 60)
    texts = [tokenizer.decode(q.token_ids) for q in found]
    assert texts == [
        "user: Hello\nassistant:",
        "user: Hello\nassistant: Hi\nuser: Bye\nassistant:",
    ]
    assert {q.source for q in found} == {name}
    assert found[0].key == key_of(tokenizer.encode_chat(chat("Hello")["messages"]))


def test_every_passage_of_a_text_becomes_a_task(tokenizer: Tokenizer, tmp_path: Path) -> None:
    paragraphs = [f"Paragraph {i} " + "word " * 50 for i in range(9)]
    path = tmp_path / "book.txt"
    path.write_text("\n\n".join(paragraphs))
    found = [tokenizer.decode(q.token_ids) for q in read_questions(path, tokenizer, 2000)]
    assert len(found) == 3
    assert len({text.split("\n")[0] for text in found}) == 3  # different tasks
    for i, paragraph in enumerate(paragraphs):
        assert paragraph.strip() in found[i // 3]
    assert list(passages(" \n\n \n")) == []


def test_a_model_without_a_chat_template_goes_on_with_the_text(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    (tmp_path / "plain").mkdir()
    tokenizer._tokenizer.save(str(tmp_path / "plain" / "tokenizer.json"))
    (tmp_path / "a.txt").write_text("Once upon a time")
    plain = Tokenizer(tmp_path / "plain")
    (found,) = read_questions(tmp_path / "a.txt", plain, 100)
    assert plain.decode(found.token_ids) == "Once upon a time"


@pytest.mark.parametrize(
    ("name", "data", "reason"),
    [
        ("a.txt", b"", "no prompt of at most 50 tokens"),
        ("a.txt", b"\xff\xfe\xff", "no UTF-8"),
        ("a.jsonl", b"{", "line 1: this is no JSON"),
        ("a.jsonl", b'{"prompt": "%s"}' % (b"x" * 99), "no prompt of at most 50 tokens"),
        ("a.jsonl.gz", b"no gzip", "cannot be read"),
        ("a.jsonl", json.dumps(chat("x")).replace("user", "assistant").encode(), "no question"),
    ],
)
def test_bad_files_are_named(
    name: str, data: bytes, reason: str, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(ConfigError, match=f"{name}.*{reason}"):
        read_questions(tmp_path / name, tokenizer, 50)


def test_given_answers_are_split_from_their_questions(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", chat("Hi", "Yes<eos>no"), chat("A", "B", "C", "D"))
    first, second = read_given(path, tokenizer, [EOS_ID], 100)
    assert tokenizer.decode(first.prompt_ids) == "user: Hi\nassistant:"
    assert tokenizer.decode(first.answer_ids) == " Yes"
    assert first.answer_ids[-1] == EOS_ID  # what ends an answer is learnt, what follows is not
    assert tokenizer.decode(second.prompt_ids) == "user: A\nassistant: B\nuser: C\nassistant:"
    assert tokenizer.decode(second.answer_ids) == " D\n"
    assert first.temperature is None
    with pytest.raises(ConfigError, match="line 1: this is no conversation that ends with"):
        list(read_given(write_lines(path, chat("Hi")), tokenizer, [], 100))


def test_given_texts_are_cut_into_pieces(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("0123456789" * 5)
    found = list(read_given(path, tokenizer, [EOS_ID], 20))
    assert [len(answer.answer_ids) for answer in found] == [20, 20, 10]
    assert tokenizer.decode([i for a in found for i in a.answer_ids]) == "0123456789" * 5


def test_files_become_a_data_set(tiny_checkpoint: Path, tmp_path: Path) -> None:
    asked = write_lines(tmp_path / "ask.jsonl", *({"prompt": f"Number {i}?"} for i in range(12)))
    given = write_lines(tmp_path / "given.jsonl", *(chat(f"{i}", f"it is {i}") for i in range(5)))
    options = CollectOptions(
        prompts=(asked,), given=(given,), limits=LIMITS, max_slots=4, num_threads=1
    )
    told: list[str] = []
    path = collect_answers(str(tiny_checkpoint), tmp_path / "data", options, told.append)
    before = path.read_bytes()
    assert collect_answers(str(tiny_checkpoint), tmp_path / "data", options) == path
    assert path.read_bytes() == before
    assert [entry.name for entry in path.parent.iterdir()] == ["answers.jsonl"]
    small = DataOptions(min_sequences=10, min_answer_tokens=50, top_k=4, num_threads=1)
    spec = make_dataset(str(tiny_checkpoint), path, tmp_path / "set", small)
    assert spec.recipe.sources == {"ask.jsonl": 12, "given.jsonl": 5}
    assert spec.identity == TargetSource.open(str(tiny_checkpoint)).identity
    assert len(Dataset.open(tmp_path / "set")) == 17


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [({}, "nothing to learn from"), ({"num_self_made": 1, "max_length": 256}, "leave no room")],
)
def test_options_that_cannot_work_are_refused(wrong: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        CollectOptions(**wrong)
