"""Data sets: the target's states in shards, the same after any accident."""

import errno
import os
import random
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from specexport.errors import CheckpointError, ConfigError, SpecExportError
from specexport.export.build import BuildOptions, build
from specexport.export.manifest import FINAL_NORM
from specexport.training import dataset, disk
from specexport.training.answers import Answer, AnswersHeader
from specexport.training.dataset import DataOptions, make_dataset, taps_for
from specexport.training.identity import TargetSource
from specexport.training.questions import key_of
from specexport.training.samples import SPEC_NAME, Dataset, ShardError
from specexport.training.sequences import batches_by_length, read_texts
from tests.tiny import VOCAB_SIZE, write_checkpoint, write_tokenizer

# Shards of some 8 sequences: 40 sequences make five of them.
OPTIONS = DataOptions(
    taps=(-1, 0, 1, FINAL_NORM),
    top_k=8,
    max_length=40,
    shard_bytes=70_000,
    min_sequences=10,
    min_answer_tokens=100,
    num_threads=1,
)


def make_answers(num: int, seed: int = 0) -> list[Answer]:
    draw = random.Random(seed)
    answers = []
    for number in range(num):
        prompt = tuple(draw.randrange(256) for _ in range(draw.randrange(2, 12)))
        answer = tuple(draw.randrange(256) for _ in range(draw.randrange(4, 40)))
        answers.append(
            Answer(
                key=key_of(prompt),
                source="chat" if number % 4 else "code",
                prompt_ids=prompt,
                answer_ids=answer,
                temperature=0.0,
            )
        )
    return answers


def write_answers(path: Path, target: Path, answers: Sequence[Answer]) -> Path:
    header = AnswersHeader(identity=TargetSource.open(str(target)).identity)
    lines = [header.model_dump_json(), *(answer.model_dump_json() for answer in answers)]
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


@pytest.fixture(scope="module")
def answers_file(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("answers") / "answers.jsonl"
    return write_answers(path, tiny_checkpoint, make_answers(40))


@pytest.fixture(scope="module")
def whole(
    tiny_checkpoint: Path, answers_file: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    folder = tmp_path_factory.mktemp("data") / "set"
    make_dataset(str(tiny_checkpoint), answers_file, folder, OPTIONS)
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def test_states_and_probabilities_are_those_of_transformers(
    whole: Path, tiny_checkpoint: Path
) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_checkpoint)
    final: dict[str, torch.Tensor] = {}
    model.model.norm.register_forward_hook(lambda _, __, output: final.update(norm=output[0]))
    model.model.layers[1].register_forward_hook(lambda _, __, output: final.update(last=output[0]))
    data = Dataset.open(whole)
    assert data.spec.taps == OPTIONS.taps
    for index in (0, 13, len(data) - 1):
        sample = data[index]
        with torch.inference_mode():
            output = model(sample.token_ids[None], output_hidden_states=True)
        embedded, first = (output.hidden_states[i][0] for i in (0, 1))
        expected = torch.cat([embedded, first, final["last"], final["norm"]], dim=-1)
        # What fp16 rounds off, and 1e-4 for the kernels.
        torch.testing.assert_close(sample.states, expected, rtol=2**-11 + 1e-4, atol=1e-4)
        probs = output.logits[0].softmax(-1)
        torch.testing.assert_close(
            sample.top_probs, probs.topk(8, dim=-1).values, rtol=1e-3, atol=1e-6
        )
        torch.testing.assert_close(
            probs.gather(-1, sample.top_ids), sample.top_probs, rtol=1e-3, atol=1e-6
        )


def test_samples_are_the_answers_in_their_order(whole: Path) -> None:
    data, answers = Dataset.open(whole), make_answers(40)
    assert len(data) == len(answers) == len(data.lengths)
    assert len(data.spec.shards) > 3
    for index, answer in enumerate(answers):
        sample, num_prompt = data[index], len(answer.prompt_ids)
        expected = (*answer.prompt_ids, *answer.answer_ids)[: OPTIONS.max_length]
        assert tuple(sample.token_ids.tolist()) == expected
        assert data.lengths[index] == len(expected)
        assert not sample.is_answer[:num_prompt].any()
        assert sample.is_answer[num_prompt:].all()
        assert sample.states.dtype == torch.float32
        assert sample.token_ids.dtype == sample.top_ids.dtype == torch.int64
    assert data.spec.recipe.sources == {"chat": 30, "code": 10}
    assert data.spec.num_answer_tokens == sum(int(data[i].is_answer.sum()) for i in range(40))
    assert data.spec.num_tokens == sum(data.lengths)
    with pytest.raises(IndexError):
        data[40]


def test_a_question_is_always_on_the_same_side(
    whole: Path, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    """Also when its answers are others, in another order, cut elsewhere; a twentieth is out."""
    answers = make_answers(40)
    shuffled = [
        answer.model_copy(update={"answer_ids": answer.answer_ids[1:]})
        for answer in random.Random(3).sample(answers, 40)
    ]
    path = write_answers(tmp_path / "answers.jsonl", tiny_checkpoint, shuffled)
    options = replace(OPTIONS, shard_bytes=30_000, max_length=20)
    make_dataset(str(tiny_checkpoint), path, tmp_path / "set", options)

    def held_out(folder: Path, order: Sequence[Answer]) -> set[str]:
        data = Dataset.open(folder)
        train, out = data.split("train"), data.split("held_out")
        assert sorted(train + out) == list(range(40))
        return {order[index].key for index in out}

    first = held_out(whole, answers)
    assert 1 <= len(first) <= 8
    assert held_out(tmp_path / "set", shuffled) == first
    many = read_texts(make_answers(2000, seed=5), 40, VOCAB_SIZE)
    assert 60 <= sum(text.is_held_out for text in many) <= 140  # 100 ± 4 standard deviations


class Killed(BaseException):
    """What a kill is to the code: nothing that it may catch."""


@pytest.mark.parametrize("number", range(11))
def test_a_run_that_is_killed_at_any_write_goes_on_to_the_same_files(
    number: int,
    whole: Path,
    tiny_checkpoint: Path,
    answers_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before the write, so that the file is missing, or after it, so that it is not noted."""
    folder, write = tmp_path / "set", disk.write_whole
    count = 0

    def killed(path: Path, data: bytes) -> None:
        nonlocal count
        count += 1
        if count > number // 2:
            if number % 2:
                write(path, data)
            raise Killed
        write(path, data)

    with monkeypatch.context() as patch:
        patch.setattr(dataset, "write_whole", killed)
        with pytest.raises(Killed):
            make_dataset(str(tiny_checkpoint), answers_file, folder, OPTIONS)
    (folder / ".graph").mkdir()  # what only a real kill leaves
    (folder / ".graph" / "target").touch()
    (folder / f".{SPEC_NAME}.123.tmp").write_bytes(b"{")
    with pytest.raises(ConfigError, match=f"not finished|holds no {SPEC_NAME}"):
        Dataset.open(folder)
    make_dataset(str(tiny_checkpoint), answers_file, folder, OPTIONS)
    assert contents(folder) == contents(whole)


def test_what_is_whole_is_not_computed_again(
    whole: Path, tiny_checkpoint: Path, answers_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dataset, "open_teacher", None)
    make_dataset(str(tiny_checkpoint), answers_file, whole, OPTIONS)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-100] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    "damage",
    [flip, lambda path: path.write_bytes(path.read_bytes()[:-1]), Path.unlink],
    ids=["bit", "length", "missing"],
)
def test_a_damaged_shard_is_named_and_made_again(
    damage: Callable[[Path], Any],
    whole: Path,
    tiny_checkpoint: Path,
    answers_file: Path,
    tmp_path: Path,
) -> None:
    folder = tmp_path / "set"
    folder.mkdir()
    for name, copied in contents(whole).items():
        (folder / name).write_bytes(copied)
    damage(folder / "shard-00002.safetensors")
    data = Dataset.open(folder)
    told: list[str] = []
    first = sum(len(shard.lengths) for shard in data.spec.shards[:2])
    assert data[first - 1].token_ids is not None  # the others can be read
    with pytest.raises(ShardError, match="shard-00002"):
        data[first]
    with pytest.raises(ShardError, match="shard-00002"):
        data.check()
    make_dataset(str(tiny_checkpoint), answers_file, folder, OPTIONS, told.append)
    assert "shard-00002" in told[0]
    assert len(told) == 2  # the damage, and one shard
    assert contents(folder) == contents(whole)


def test_answers_that_come_later_add_shards(
    whole: Path, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "set"
    told: list[str] = []
    half = write_answers(tmp_path / "half.jsonl", tiny_checkpoint, make_answers(40)[:20])
    make_dataset(str(tiny_checkpoint), half, folder, OPTIONS)
    half.write_text(half.read_text() + '{"key": "cut o')  # still being written
    make_dataset(str(tiny_checkpoint), half, folder, OPTIONS)
    full = write_answers(tmp_path / "full.jsonl", tiny_checkpoint, make_answers(40))
    make_dataset(str(tiny_checkpoint), full, folder, OPTIONS, told.append)
    assert contents(folder) == contents(whole)
    assert len(told) < len(Dataset.open(whole).spec.shards)  # the first ones stayed
    make_dataset(str(tiny_checkpoint), half, folder, OPTIONS)  # and fewer answers, fewer shards
    names = {shard.path for shard in Dataset.open(folder).spec.shards}
    assert set(contents(folder)) == {*names, SPEC_NAME}


def test_the_budget_ends_the_set_with_a_message(
    whole: Path, tiny_checkpoint: Path, answers_file: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "set"
    told: list[str] = []
    options = replace(OPTIONS, budget_bytes=150_000)
    make_dataset(str(tiny_checkpoint), answers_file, folder, options, told.append)
    data = Dataset.open(folder)
    assert told[0].startswith(f"The budget of 150000 bytes holds {len(data)} of 40 sequences")
    files = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    # What safetensors' headers take, and less than a sequence.
    assert 135_000 < files < 150_000 + 500 * len(data.spec.shards)
    assert data[0].states.equal(Dataset.open(whole)[0].states)


@pytest.mark.parametrize("number", range(4))
def test_a_full_disk_is_one_error_and_the_run_can_go_on(
    number: int,
    whole: Path,
    tiny_checkpoint: Path,
    answers_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder, fsync, count = tmp_path / "set", os.fsync, 0

    def full(descriptor: int) -> None:
        nonlocal count
        count += 1
        if count > number:
            raise OSError(errno.ENOSPC, "No space left on device")
        fsync(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", full)
        with pytest.raises(SpecExportError, match=r"disk is full.*set.*run the same command again"):
            make_dataset(str(tiny_checkpoint), answers_file, folder, OPTIONS)
    kept = contents(folder)
    assert not [name for name in kept if name.startswith(".")]
    for name in set(kept) - {SPEC_NAME}:
        assert kept[name] == (whole / name).read_bytes()
    make_dataset(str(tiny_checkpoint), answers_file, folder, OPTIONS)
    assert contents(folder) == contents(whole)


def test_too_little_space_is_told_before_anything_is_computed(
    tiny_checkpoint: Path, answers_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr("shutil.disk_usage", lambda folder: usage)
    with pytest.raises(SpecExportError, match=r"needs 0.00 GB more.*--data-budget"):
        make_dataset(str(tiny_checkpoint), answers_file, tmp_path / "set", OPTIONS)
    assert contents(tmp_path / "set") == {}


def test_too_few_answers_are_refused_with_the_figures(
    tiny_checkpoint: Path, answers_file: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=r"40 sequences with \d+ answer tokens.*50 with 10000"):
        make_dataset(str(tiny_checkpoint), answers_file, tmp_path / "set")
    options = replace(OPTIONS, min_answer_tokens=10_000)
    with pytest.raises(ConfigError, match="at least 10 with 10000"):
        make_dataset(str(tiny_checkpoint), answers_file, tmp_path / "set", options)
    assert not (tmp_path / "set").exists()


def test_another_target_or_tokenizer_is_refused_by_both_names(
    whole: Path, tiny_checkpoint: Path, answers_file: Path, tmp_path: Path
) -> None:
    other = write_checkpoint(tmp_path / "other", "llama", seed=1)
    swapped = write_checkpoint(tmp_path / "swapped", "llama")
    write_tokenizer(swapped, swapped=(3, 4))
    ours = TargetSource.open(str(tiny_checkpoint)).identity
    for checkpoint, what in ((other, "target"), (swapped, "tokenizer")):
        theirs = getattr(TargetSource.open(str(checkpoint)).identity, what)
        mine = getattr(ours, what)
        both = f"another {what}: its SHA-256 is {mine[:12]}.*given now {theirs[:12]}"
        with pytest.raises(ConfigError, match=f"file of answers .*{both}"):
            make_dataset(str(checkpoint), answers_file, tmp_path / "set", OPTIONS)
        own = write_answers(tmp_path / f"{what}.jsonl", checkpoint, make_answers(40))
        with pytest.raises(ConfigError, match=f"The data set .*{both}"):
            make_dataset(str(checkpoint), own, whole, OPTIONS)


@pytest.mark.parametrize(("name", "value"), [("taps", (1,)), ("state_type", "bf16"), ("top_k", 4)])
def test_a_folder_of_another_kind_is_refused(
    name: str, value: Any, whole: Path, tiny_checkpoint: Path, answers_file: Path
) -> None:
    before = contents(whole)
    with pytest.raises(ConfigError, match=f"was made with {name} .*now .*wanted"):
        make_dataset(str(tiny_checkpoint), answers_file, whole, replace(OPTIONS, **{name: value}))
    assert contents(whole) == before


def test_a_quantized_bundle_is_no_target(tiny_checkpoint: Path, tmp_path: Path) -> None:
    build(str(tiny_checkpoint), tmp_path / "fp32", BuildOptions())
    build(str(tiny_checkpoint), tmp_path / "int8", BuildOptions(weight_type="int8"))
    assert (
        TargetSource.open(str(tmp_path / "fp32")).identity
        == TargetSource.open(str(tiny_checkpoint)).identity
    )
    with pytest.raises(ConfigError, match=f"int8.*give the checkpoint.*{tiny_checkpoint}"):
        TargetSource.open(str(tmp_path / "int8"))


def test_taps_that_the_target_lacks_are_refused(
    tiny_checkpoint: Path, answers_file: Path, tmp_path: Path
) -> None:
    options = replace(OPTIONS, taps=(0, 7))
    with pytest.raises(CheckpointError, match=r"layers \[7\].*layers 0 to 1"):
        make_dataset(str(tiny_checkpoint), answers_file, tmp_path / "set", options)


def test_states_that_do_not_fit_are_refused_and_bf16_holds_them(
    answers_file: Path, tmp_path: Path
) -> None:
    def enlarge(model: Any) -> None:
        model.model.norm.weight.data[5] = 1e5

    large = write_checkpoint(tmp_path / "large", "llama", edit=enlarge)
    path = write_answers(tmp_path / "answers.jsonl", large, make_answers(20))
    with pytest.raises(ConfigError, match=r"does not fit fp16.*as bf16"):
        make_dataset(str(large), path, tmp_path / "set", OPTIONS)
    options = replace(OPTIONS, state_type="bf16")
    make_dataset(str(large), path, tmp_path / "wide", options)
    assert Dataset.open(tmp_path / "wide")[0].states.abs().max() > 65504


def test_a_draft_model_needs_no_states(
    tiny_checkpoint: Path, answers_file: Path, tmp_path: Path
) -> None:
    options = replace(OPTIONS, taps=taps_for(["draft"], 2))
    make_dataset(str(tiny_checkpoint), answers_file, tmp_path / "set", options)
    sample = Dataset.open(tmp_path / "set")[3]
    assert sample.states.shape == (len(sample.token_ids), 0)
    assert sample.top_probs.shape == (len(sample.token_ids), 8)


def test_a_data_set_for_several_methods_has_the_taps_of_all() -> None:
    assert taps_for(["eagle3"], 30) == (1, 14, 26, FINAL_NORM)  # the last one to begin from
    assert taps_for(["mtp", "medusa"], 30) == (FINAL_NORM,)
    assert taps_for(["medusa", "eagle3", "draft", "mtp"], 30) == (1, 14, 26, FINAL_NORM)


def test_columns_find_the_taps_of_a_method(whole: Path) -> None:
    data = Dataset.open(whole)
    columns = data.spec.columns((1, FINAL_NORM))
    assert columns == [*range(64, 96), *range(96, 128)]
    with pytest.raises(ConfigError, match=r"\[9\] are needed"):
        data.spec.columns((9,))


def test_batches_are_of_like_length_and_hold_everything_once() -> None:
    texts = read_texts(make_answers(300, seed=2), 40, VOCAB_SIZE)
    batches = list(batches_by_length(texts, 128, 5))
    assert sorted(i for batch in batches for i in batch) == list(range(len(texts)))
    for batch in batches:
        assert len(batch) <= 5
        assert len(batch) * max(len(texts[i]) for i in batch) <= 128


@pytest.mark.parametrize("text", ["", "{", '{"schema_version": 9}', '{"schema_version": 1}'])
def test_a_damaged_description_is_one_error(text: str, tmp_path: Path) -> None:
    (tmp_path / SPEC_NAME).write_text(text)
    with pytest.raises(ConfigError, match=SPEC_NAME):
        Dataset.open(tmp_path)
