"""Prompts that ship with specexport, and a user's."""

import json
import shutil
from pathlib import Path

import pytest

from specexport.bench.prompts import Prompt, encode_prompts, read_prompts, shipped_prompts
from specexport.errors import ConfigError
from specexport.runtime.tokenizer import Tokenizer
from tests.tiny import write_tokenizer


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    write_tokenizer(tmp_path)
    return Tokenizer(tmp_path)


def without_template(folder: Path) -> Tokenizer:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    write_tokenizer(folder)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    del config["chat_template"]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return Tokenizer(folder)


def test_thirty_two_different_prompts_ship_short_and_long_ones() -> None:
    texts = [prompt.content for prompt in shipped_prompts()]
    assert len(set(texts)) == 32
    lengths = sorted(len(text) for text in texts)
    assert lengths[8] < 250
    assert lengths[-8] > 800


def test_a_text_file_has_a_prompt_on_each_line(tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_bytes("\ufefffirst\r\n\n  second {1}  \n".encode())
    assert read_prompts(path) == [
        Prompt(f"{path}, line 1", "first"),
        Prompt(f"{path}, line 3", "second {1}"),
    ]


@pytest.mark.parametrize("suffix", [".jsonl", ".ndjson", ".JSONL"])
def test_a_json_file_has_prompts_or_conversations(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"prompts{suffix}"
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    lines = [json.dumps({"prompt": "one\ntwo", "id": 7}), json.dumps({"messages": chat})]
    path.write_text("\n".join(lines))
    assert [prompt.content for prompt in read_prompts(path)] == ["one\ntwo", tuple(chat)]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2: this is no JSON"),
        ("[" * 100_000, "line 2: this is no JSON"),
        ('"text"', 'line 2: expected a JSON object with "prompt"'),
        ("{}", 'line 2: expected a JSON object with "prompt"'),
        ('{"prompt": "a", "messages": []}', 'line 2: expected a JSON object with "prompt"'),
        ('{"prompt": 3}', 'line 2: "prompt" must be a text'),
        ('{"prompt": " "}', 'line 2: "prompt" must be a text that is not empty'),
        ('{"messages": []}', 'line 2: "messages" must be a list'),
        ('{"messages": [{"role": "user"}]}', 'line 2: "messages" must be a list'),
        ('{"messages": ["hi"]}', 'line 2: "messages" must be a list'),
    ],
)
def test_a_mistake_is_named_with_its_line(line: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(f'{{"prompt": "good"}}\n{line}\n')
    with pytest.raises(ConfigError, match=message):
        read_prompts(path)


def test_files_that_hold_no_text_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_bytes(b"good\n\xff\xfe\n")
    with pytest.raises(ConfigError, match="line 2: this is no UTF-8"):
        read_prompts(path)
    path.write_text("\n \n")
    with pytest.raises(ConfigError, match="holds no prompt"):
        read_prompts(path)
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        read_prompts(tmp_path / "missing.txt")


def test_texts_are_sent_as_a_chat_where_the_model_has_a_template(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    prompts = [Prompt("line 1", "hi")]
    (as_chat,) = encode_prompts(prompts, tokenizer, 100)
    assert list(as_chat) == tokenizer.encode_chat([{"role": "user", "content": "hi"}])
    plain = without_template(tmp_path / "plain")
    (as_text,) = encode_prompts(prompts, plain, 100)
    assert list(as_text) == plain.encode("hi")


def test_a_conversation_needs_a_template(tmp_path: Path) -> None:
    prompts = [Prompt("line 4", ({"role": "user", "content": "hi"},))]
    with pytest.raises(ConfigError, match="line 4: This model has no chat template"):
        encode_prompts(prompts, without_template(tmp_path / "plain"), 100)


def test_a_prompt_that_leaves_no_room_is_refused(tokenizer: Tokenizer) -> None:
    prompts = [Prompt("line 1", "hi"), Prompt("line 2", "x" * 90)]
    with pytest.raises(ConfigError, match=r"line 2 has 108 tokens; .* room for 80 beside"):
        encode_prompts(prompts, tokenizer, 80)
