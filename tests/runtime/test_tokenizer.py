"""Text in and out."""

import json
import shutil
from pathlib import Path

import pytest
import transformers

from specexport.errors import BundleError, RequestError
from specexport.runtime.tokenizer import Tokenizer
from tests.tiny import write_tokenizer

TEXTS = [
    "Hello, world!",
    "naïve café",
    "日本語 テキスト",
    "👩‍🚀 emoji 🙂",
    "tabs\tand\n\nlines ",
    " ",
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_tokenizer(tmp_path)
    return tmp_path


@pytest.mark.parametrize("text", TEXTS)
def test_text_survives_the_round_trip(folder: Path, text: str) -> None:
    tokenizer = Tokenizer(folder)
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize("text", TEXTS)
def test_streamed_text_equals_the_whole_and_never_splits_a_character(
    folder: Path, text: str
) -> None:
    tokenizer = Tokenizer(folder)
    stream = tokenizer.stream()
    pieces = [stream.push([token_id]) for token_id in tokenizer.encode(text)]
    assert "�" not in "".join(pieces)
    assert "".join(pieces) + stream.finish() == text


def test_a_character_cut_off_at_the_end_is_marked(folder: Path) -> None:
    tokenizer = Tokenizer(folder)
    stream = tokenizer.stream()
    assert stream.push(tokenizer.encode("a🙂")[:-1]) == "a"
    assert "�" in stream.finish()


def test_special_tokens_are_not_shown(folder: Path) -> None:
    tokenizer = Tokenizer(folder)
    ids = [*tokenizer.encode("hi"), 257]
    stream = tokenizer.stream()
    assert stream.push(ids) + stream.finish() == tokenizer.decode(ids) == "hi"


def test_the_chat_template_gives_what_transformers_gives(folder: Path) -> None:
    messages = [
        {"role": "system", "content": "Be <brief> & kind."},
        {"role": "user", "content": "Hé!"},
        {"role": "assistant", "content": "Yes?"},
        {"role": "user", "content": "Bye"},
    ]
    config = json.loads((folder / "tokenizer_config.json").read_text())
    reference = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), bos_token="<bos>", eos_token="<eos>"
    )
    expected = reference.apply_chat_template(
        messages,
        chat_template=config["chat_template"],
        add_generation_prompt=True,
        return_dict=False,
    )
    assert Tokenizer(folder).encode_chat(messages) == expected


def test_templates_may_use_json_dates_and_loop_controls(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text(
        "{{ strftime_now('%Y') | length }}{{ messages[0] | tojson }}"
        "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}x{% endfor %}"
    )
    tokenizer = Tokenizer(folder)
    message = {"role": "user", "content": "<é>"}
    text = tokenizer.decode(tokenizer.encode_chat([message, message]))
    assert text == '4{"role": "user", "content": "<é>"}x'


def test_a_template_that_refuses_gives_its_reason(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{{ raise_exception('no system role') }}")
    with pytest.raises(RequestError, match="no system role"):
        Tokenizer(folder).encode_chat([{"role": "system", "content": ""}])


def test_a_model_without_template_takes_text_only(folder: Path) -> None:
    (folder / "tokenizer_config.json").write_text("{}")
    with pytest.raises(RequestError, match="no chat template"):
        Tokenizer(folder).encode_chat([{"role": "user", "content": "hi"}])


def test_named_templates_use_the_default_one(folder: Path) -> None:
    named = [{"name": "rag", "template": "no"}, {"name": "default", "template": "yes"}]
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    tokenizer = Tokenizer(folder)
    assert tokenizer.decode(tokenizer.encode_chat([])) == "yes"


def test_a_damaged_tokenizer_is_an_error(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(BundleError, match=r"tokenizer\.json cannot be read"):
        Tokenizer(folder)
    shutil.rmtree(folder)
    with pytest.raises(BundleError):
        Tokenizer(folder)
