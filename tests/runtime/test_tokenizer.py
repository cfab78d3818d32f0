"""Text in and out."""

import json
import shutil
from pathlib import Path

import pytest
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import decoders, models

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


def test_templates_see_no_tools_and_may_mark_generation(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text(
        "{% if tools is not none %}tools{% endif %}{% if documents is not none %}docs{% endif %}"
        "{% generation %}{{ {'b': 1, 'a': 'é'} | tojson(sort_keys=true, ensure_ascii=true) }}"
        "{% endgeneration %}"
    )
    tokenizer = Tokenizer(folder)
    text = tokenizer.decode(tokenizer.encode_chat([{"role": "user", "content": "hi"}]))
    assert text == '{"a": "\\u00e9", "b": 1}'


def test_special_tokens_may_stand_in_their_own_file(folder: Path) -> None:
    config = json.loads((folder / "tokenizer_config.json").read_text())
    bos = config.pop("bos_token")
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "special_tokens_map.json").write_text(json.dumps({"bos_token": bos}))
    assert Tokenizer(folder).encode_chat([])[0] == 256


@pytest.mark.parametrize("template", ["{{ 1 / 0 }}", "{{ messages + 1 }}", "{% if %}"])
def test_a_broken_template_is_an_error_of_ours(folder: Path, template: str) -> None:
    (folder / "chat_template.jinja").write_text(template)
    with pytest.raises(RequestError, match="chat template refuses"):
        Tokenizer(folder).encode_chat([{"role": "user", "content": "hi"}])


@pytest.mark.parametrize("content", ["{", "[]", "null"])
def test_a_damaged_tokenizer_config_is_an_error(folder: Path, content: str) -> None:
    (folder / "tokenizer_config.json").write_text(content)
    with pytest.raises(BundleError, match=r"tokenizer_config\.json"):
        Tokenizer(folder)


def byte_fallback_tokenizer(folder: Path) -> Tokenizer:
    """A SentencePiece-like vocabulary: words that begin with a space, and all bytes."""
    words = ["<unk>", "▁", "a", "b", "▁a", "▁b", "é"]
    vocab = {w: i for i, w in enumerate([*words, *(f"<0x{i:02X}>" for i in range(256))])}
    raw = RawTokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    raw.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    raw.add_special_tokens(["<unk>"])
    raw.save(str(folder / "tokenizer.json"))
    return Tokenizer(folder)


@given(data=st.data())
@settings(max_examples=300)
def test_streamed_text_equals_the_whole_with_byte_fallback(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    tokenizer = byte_fallback_tokenizer(tmp_path_factory.mktemp("bytes"))
    emoji = [7 + b for b in "🙂".encode()]
    runs = st.sampled_from([[1], [2], [3], [4], [5], [6], [0], [7 + 0x61], [7 + 0x0A], emoji])
    token_ids = [t for run in data.draw(st.lists(runs, max_size=12)) for t in run]
    stream = tokenizer.stream()
    text = "".join(stream.push([t]) for t in token_ids) + stream.finish()
    assert text == tokenizer.decode(token_ids)


@given(data=st.data())
@settings(max_examples=300)
def test_streamed_text_goes_on_from_a_context(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """As an echoed prompt's continuation must: SentencePiece drops the first space of a text."""
    tokenizer = byte_fallback_tokenizer(tmp_path_factory.mktemp("bytes"))
    emoji = [7 + b for b in "🙂".encode()]
    runs = st.sampled_from([[1], [2], [3], [4], [5], [6], [0], [7 + 0x61], [7 + 0x0A], emoji])
    context = [t for run in data.draw(st.lists(runs, min_size=1, max_size=5)) for t in run]
    # A byte right after a byte changes how the context itself reads; characters stand alone.
    context.append(data.draw(st.sampled_from([2, 3, 4, 5])))
    token_ids = [t for run in data.draw(st.lists(runs, max_size=8)) for t in run]
    stream = tokenizer.stream(context)
    text = "".join(stream.push([t]) for t in token_ids) + stream.finish()
    assert tokenizer.decode(context) + text == tokenizer.decode([*context, *token_ids])


@given(data=st.data())
@settings(max_examples=200)
def test_added_tokens_stream_as_they_decode_and_no_character_shows_before_it_is_whole(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Added tokens show, special ones do not, even between the bytes of a character."""
    folder = tmp_path_factory.mktemp("added")
    write_tokenizer(folder)
    raw = RawTokenizer.from_file(str(folder / "tokenizer.json"))
    raw.add_tokens(["<tool>", "two words"])
    raw.save(str(folder / "tokenizer.json"))
    tokenizer = Tokenizer(folder)
    words = ["a", " b", "é", "🙂", "日"]
    runs = st.sampled_from([[256], [257], [258], [259], *map(tokenizer.encode, words)])
    token_ids = [t for run in data.draw(st.lists(runs, max_size=10)) for t in run]
    place = data.draw(st.integers(0, len(token_ids)))
    token_ids.insert(place, 256)  # special, maybe inside a character
    whole = tokenizer.decode(token_ids)
    stream, shown = tokenizer.stream(), ""
    for token_id in token_ids:
        shown += stream.push([token_id])
        assert whole.startswith(shown)
    assert shown + stream.finish() == whole
    assert "\ufffd" not in shown


def test_a_byte_run_that_never_becomes_a_character_streams_without_an_error(folder: Path) -> None:
    tokenizer = byte_fallback_tokenizer(folder)
    stream = tokenizer.stream()
    assert stream.push([7 + 0x61, 7 + 0xF0, 2]).startswith("a")
    assert stream.push([2, 7 + 0x0A]) == "a\n"
    assert stream.push([7 + 0xF0, 7 + 0x9F]) == ""
    assert "�" in stream.finish()


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
