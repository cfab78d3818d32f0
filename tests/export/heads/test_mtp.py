"""MTP layers inside a target's checkpoint, against transformers' modules and plain equations."""

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch
import transformers
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel

from specexport.errors import CheckpointError
from specexport.export.checkpoint import open_checkpoint
from specexport.export.decoder import build_decoder
from specexport.export.families import read_config
from specexport.export.heads.mtp import plan_mtp
from specexport.export.heads.plan import HeadPlan
from specexport.export.manifest import FloatType
from specexport.export.weights import write_weights
from tests.head_runner import HeadRunner
from tests.tiny import VOCAB_SIZE, edit_config, write_checkpoint
from tests.tiny_mtp import (
    NUM_LAYERS,
    PUBLISHED,
    MtpReference,
    replace_tensors,
    write_mtp_checkpoint,
)

MAX_LENGTH = 64
# fp32 on both sides; logits have a standard deviation near 2. The sums differ in order only.
ATOL = 1e-4
PROMPT = np.random.default_rng(0).integers(0, VOCAB_SIZE, 12).tolist()


def build(path: Path) -> HeadPlan:
    """Plan and build the head's graph; nothing is written."""
    checkpoint = open_checkpoint(path)
    config = read_config(checkpoint.config)
    plan = plan_mtp(checkpoint, config)
    plan.build(build_decoder(config, "fp32", MAX_LENGTH).builder, "fp32", MAX_LENGTH)
    return plan


@dataclass
class Exported:
    """A target's graph and its head's, in one folder."""

    reference: MtpReference
    plan: HeadPlan
    folder: Path

    def head(self) -> HeadRunner:
        return HeadRunner(self.folder / "head.onnx")


def export(folder: Path, reference: MtpReference, weight_type: FloatType = "fp32") -> Exported:
    checkpoint = open_checkpoint(folder / "checkpoint")
    config = read_config(checkpoint.config)
    head_plan = plan_mtp(checkpoint, config)
    target = build_decoder(config, weight_type, MAX_LENGTH, head_plan.taps)
    step = head_plan.build(target.builder, weight_type, MAX_LENGTH).step
    assert step is not None
    for graph, tensors, name in ((target, checkpoint, "target"), (step, head_plan.tensors, "head")):
        write_weights(graph, tensors, folder / f"{name}.weights")
        ir.save(graph.model, folder / f"{name}.onnx")
        onnx.checker.check_model(str(folder / f"{name}.onnx"), full_check=True)
    return Exported(reference, head_plan, folder)


@pytest.fixture(scope="module", params=PUBLISHED)
def exported(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Exported:
    folder = tmp_path_factory.mktemp("mtp")
    return export(folder, write_mtp_checkpoint(folder / "checkpoint", request.param))


def test_logits_and_recycled_states_equal_the_reference_over_draft_steps(
    exported: Exported,
) -> None:
    reference, head = exported.reference, exported.head()
    next_token = int(reference.target_logits(PROMPT)[-1].argmax())
    ids = [*PROMPT[1:], next_token]
    hidden = reference.target_states(PROMPT)
    parts = [  # catching up, in chunks
        head.run(ids[a:b], hidden[a:b].numpy()) for a, b in ((0, 5), (5, 6), (6, len(ids)))
    ]
    for _ in range(5):  # each drafted token with the recycled state of the one before
        logits, recycled = reference.run(ids, hidden)
        np.testing.assert_allclose(parts[-1][0][-1], logits[-1], atol=ATOL)
        np.testing.assert_allclose(parts[-1][1][-1], recycled[-1], atol=ATOL)
        ids.append(int(logits[-1].argmax()))
        hidden = torch.cat([hidden, recycled[-1:]])
        parts.append(head.run(ids[-1:], parts[-1][1][-1:]))
    logits, recycled = reference.run(ids, hidden)
    np.testing.assert_allclose(np.concatenate([p[0] for p in parts]), logits, atol=ATOL)
    np.testing.assert_allclose(np.concatenate([p[1] for p in parts]), recycled, atol=ATOL)


@pytest.mark.parametrize("kind", ["deepseek_v3", "glm4_moe"])
def test_logits_and_recycled_states_equal_transformers_own_mtp_model(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers reads the same checkpoint; its positions are later by 1, which RoPE ignores."""
    head = export(tmp_path, write_mtp_checkpoint(tmp_path / "checkpoint", kind)).head()
    model_class = {
        "deepseek_v3": transformers.DeepseekV3ForCausalLM,
        "glm4_moe": transformers.Glm4MoeForCausalLM,
    }[kind]
    # It knows the numbers of the published models' MTP layers alone.
    monkeypatch.setattr(
        model_class, "_keys_to_ignore_on_load_unexpected", [rf"model\.layers\.{NUM_LAYERS}\."]
    )
    model = model_class.from_pretrained(tmp_path / "checkpoint", dtype=torch.float32)
    mtp = MtpModel.from_pretrained(model).eval()
    ids, n = torch.tensor([PROMPT]), len(PROMPT)
    with torch.inference_mode():
        hidden = model.model(ids).last_hidden_state[:, :-1]
        expected = mtp.forward_layer(
            0,
            hidden,
            torch.arange(1, n)[None],
            MtpCache(config=model.config.get_mtp_config()),
            input_ids=ids[:, 1:],
        )
        expected_logits = mtp.shared_head(expected)
    logits, recycled = head.run(PROMPT[1:], hidden[0].numpy())
    np.testing.assert_allclose(logits, expected_logits[0], atol=ATOL)
    np.testing.assert_allclose(recycled, expected[0], atol=ATOL)


def test_the_targets_tap_is_the_state_that_the_layer_reads(exported: Exported) -> None:
    session = ort.InferenceSession(exported.folder / "target.onnx")
    n = len(PROMPT)
    feeds: dict[str, Any] = {
        "input_ids": np.array([PROMPT]),
        "position_ids": np.arange(n)[None],
        "write_indices": np.array([0]),
        "attention_mask": np.tri(n, dtype=bool)[None, None],
        "logits_indices": np.arange(n),
    }
    for value in session.get_inputs():
        if value.name.startswith("past_key_values."):
            sizes = {"batch": 1, "cache_length": MAX_LENGTH}
            feeds[value.name] = np.zeros([sizes.get(d, d) for d in value.shape], np.float32)
    (tapped,) = session.run(["hidden_states"], feeds)
    expected = exported.reference.target_states(PROMPT)
    np.testing.assert_allclose(tapped[0], expected, atol=ATOL)


def test_the_other_order_and_the_other_side_of_the_final_norm_give_other_drafts(
    exported: Exported,
) -> None:
    reference, published = exported.reference, exported.reference.published
    hidden = reference.target_states(PROMPT)
    logits, recycled = exported.head().run(PROMPT, hidden.numpy())
    for changed in (
        replace(published, hidden_first=not published.hidden_first),
        replace(published, reads_normed=not published.reads_normed),
    ):
        other = replace(reference, published=changed)
        other_logits, other_recycled = other.run(PROMPT, other.target_states(PROMPT))
        assert np.abs(logits - other_logits.numpy()).max() > 0.1
        assert np.abs(recycled - other_recycled.numpy()).max() > 0.1


def test_the_token_at_position_0_is_embedded_like_any_other(exported: Exported) -> None:
    hidden = exported.reference.target_states(PROMPT)[:1].numpy()
    first, second = (exported.head().run([token], hidden)[0] for token in (3, 4))
    assert np.abs(first - second).max() > 0.1


def test_embedding_and_output_matrix_are_the_targets_and_stored_once(exported: Exported) -> None:
    locations = {}
    for name in ("target", "head"):
        model = onnx.load(exported.folder / f"{name}.onnx", load_external_data=False)
        for tensor in model.graph.initializer:
            if VOCAB_SIZE in tensor.dims:
                entries = {e.key: e.value for e in tensor.external_data}
                locations[name, tensor.name] = entries["location"], entries["offset"]
    for matrix in ("model.embed_tokens.weight", "lm_head.weight"):
        assert locations["head", matrix] == locations["target", matrix]


@pytest.mark.parametrize("matrix", [0, 1])
def test_a_stored_embedding_or_output_matrix_that_differs_is_used(
    matrix: int, tmp_path: Path
) -> None:
    reference = write_mtp_checkpoint(tmp_path / "checkpoint", "deepseek_v3")
    assert reference.published.copies is not None
    name = f"{reference.published.copies[matrix]}.weight"
    own = torch.randn(VOCAB_SIZE, 32, generator=torch.Generator().manual_seed(1)) * 0.2
    replace_tensors(tmp_path / "checkpoint", {name: own})
    reference.weights[("embedding", "lm_head")[matrix]] = own
    exported = export(tmp_path, reference)
    hidden = reference.target_states(PROMPT)
    logits, _ = reference.run(PROMPT, hidden)
    np.testing.assert_allclose(exported.head().run(PROMPT, hidden.numpy())[0], logits, atol=ATOL)
    assert any(note.startswith(f"{name} differs from") for note in exported.plan.notes)


def test_fp8_matrices_of_the_layer_are_dequantized(tmp_path: Path) -> None:
    reference = write_mtp_checkpoint(tmp_path / "checkpoint", "deepseek_v3")
    output = reference.model.model.layers[NUM_LAYERS].self_attn.o_proj.weight.data
    block, factor = 16, 0.004
    for name, matrix in (
        ("model.layers.2.eh_proj.weight", reference.weights["projection"]),
        ("model.layers.2.self_attn.o_proj.weight", output),
    ):
        stored = (matrix / factor).to(torch.float8_e4m3fn)
        scales = torch.full([-(-size // block) for size in matrix.shape], factor)
        replace_tensors(tmp_path / "checkpoint", {name: stored, f"{name}_scale_inv": scales})
        matrix.copy_(stored.float() * factor)  # now the reference's, too
    quantization = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [block, block]}
    edit_config(tmp_path / "checkpoint", quantization_config=quantization)
    head = export(tmp_path, reference).head()
    hidden = reference.target_states(PROMPT)
    logits, _ = reference.run(PROMPT, hidden)
    np.testing.assert_allclose(head.run(PROMPT, hidden.numpy())[0], logits, atol=ATOL)


def test_rotary_frequencies_that_nothing_reads_are_no_error(tmp_path: Path) -> None:
    write_mtp_checkpoint(tmp_path, "mimo")
    name = "model.mtp_layers.0.self_attn.rotary_emb.inv_freq"
    replace_tensors(tmp_path, {name: torch.ones(4)})
    assert name not in build(tmp_path).tensors.names()


def test_copies_of_the_targets_matrices_are_optional(tmp_path: Path) -> None:
    reference = write_mtp_checkpoint(tmp_path, "deepseek_v3")
    assert reference.published.copies is not None
    with_copies = build(tmp_path)
    replace_tensors(tmp_path, {f"{m}.weight": None for m in reference.published.copies})
    without = build(tmp_path)
    assert set(without.tensors.names()) == set(with_copies.tensors.names())
    assert (len(with_copies.notes), without.notes) == (2, ())


@pytest.mark.parametrize(
    ("kind", "options"),
    [("qwen3", {"tie_word_embeddings": True}), ("ernie4_5_moe", {"use_bias": True})],
)
def test_tied_embeddings_and_the_bias_of_the_output_matrix_are_the_targets_too(
    kind: str, options: dict[str, Any], tmp_path: Path
) -> None:
    reference = write_mtp_checkpoint(tmp_path / "checkpoint", kind, **options)
    head = export(tmp_path, reference).head()
    hidden = reference.target_states(PROMPT)
    logits, _ = reference.run(PROMPT, hidden)
    np.testing.assert_allclose(head.run(PROMPT, hidden.numpy())[0], logits, atol=ATOL)


def test_the_cache_is_laid_out_as_the_targets(exported: Exported) -> None:
    shapes = {
        name: [
            [*value.shape[1:]]
            for value in ort.InferenceSession(exported.folder / f"{name}.onnx").get_inputs()
            if value.name.startswith("past_key_values.0.")
        ]
        for name in ("target", "head")
    }
    assert shapes["head"] == shapes["target"]
    latent = exported.reference.published.family == "deepseek_v3"
    assert len(shapes["head"]) == (1 if latent else 2)


@pytest.mark.parametrize("weight_type", ["bf16", "fp16"])
def test_rounded_weights_change_drafts_a_little(weight_type: Any, tmp_path: Path) -> None:
    reference = write_mtp_checkpoint(tmp_path / "checkpoint", "glm4_moe")
    head = export(tmp_path, reference, weight_type).head()
    hidden = reference.target_states(PROMPT)
    logits = head.run(PROMPT, hidden.numpy())[0]
    difference = np.abs(logits - reference.run(PROMPT, hidden)[0].numpy())
    assert 0 < np.median(difference) < 0.1  # 8 bits of bf16's mantissa, logits near 1


def test_every_tensor_of_the_layer_is_mapped_under_its_published_name(exported: Exported) -> None:
    published = exported.reference.published
    names = set(exported.plan.tensors.names())
    modules = (*published.norms, published.projection, f"{published.block}.self_attn.o_proj")
    assert {f"{module}.weight" for module in modules} <= names
    assert all(name.startswith(("mtp.", "model.mtp_", "model.layers.2.")) for name in names)


@pytest.mark.parametrize("kind", PUBLISHED)
def test_a_missing_tensor_is_named(kind: str, tmp_path: Path) -> None:
    reference = write_mtp_checkpoint(tmp_path, kind)
    published = reference.published
    for module in (published.projection, published.norms[1], f"{published.block}.self_attn.o_proj"):
        name = f"{module}.weight"
        kept = open_checkpoint(tmp_path).tensor(name).copy()
        replace_tensors(tmp_path, {name: None})
        with pytest.raises(CheckpointError, match=f"lacks 1 .*'{re.escape(name)}'"):
            build(tmp_path)
        replace_tensors(tmp_path, {name: torch.from_numpy(kept)})
    build(tmp_path)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("mimo", "model.mtp_layers.0.self_attn.q_norm.weight"),
        ("qwen3", "mtp.embed_tokens.weight"),
        ("glm4_moe", "model.layers.2.mlp.experts.8.up_proj.weight"),
        ("ernie4_5_moe", "model.mtp_linear_proj.0.bias"),
        ("qwen3", "mtp.layers.0.self_attn.q_proj.bias"),
    ],
)
def test_an_unused_tensor_is_named(kind: str, name: str, tmp_path: Path) -> None:
    write_mtp_checkpoint(tmp_path, kind)
    replace_tensors(tmp_path, {name: torch.zeros(4)})
    with pytest.raises(CheckpointError, match=f"does not read, first '{re.escape(name)}'"):
        build(tmp_path)


def test_a_tensor_of_another_shape_is_named(tmp_path: Path) -> None:
    write_mtp_checkpoint(tmp_path, "qwen3")
    replace_tensors(tmp_path, {"mtp.fc.weight": torch.zeros(32, 32)})
    with pytest.raises(CheckpointError, match=r"fc\.weight has shape \[32, 32\]; \[32, 64\]"):
        build(tmp_path)


def test_a_checkpoint_without_an_mtp_layer_says_so(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "qwen3")
    with pytest.raises(CheckpointError, match="holds no multi-token-prediction layer"):
        build(tmp_path)


def test_a_config_that_announces_a_layer_which_is_not_there_is_reported(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "mimo")
    edit_config(tmp_path, num_nextn_predict_layers=1)
    with pytest.raises(CheckpointError, match=r"holds no .* though its config.json announces 1"):
        build(tmp_path)


def test_an_unknown_layout_is_named(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "qwen3")
    replace_tensors(tmp_path, {"mtp.something.weight": torch.ones(4)})
    with pytest.raises(CheckpointError, match=r"unknown layout, first 'mtp\.something\.weight'"):
        build(tmp_path)


@pytest.mark.parametrize(
    ("kind", "second"),
    [
        ("mimo", "model.mtp_layers.1"),
        ("qwen3", "mtp.layers.1"),
        ("glm4_moe", "model.layers.3"),
        ("ernie4_5_moe", "model.mtp_block.1"),
    ],
)
def test_several_mtp_layers_are_refused_with_their_number(
    kind: str, second: str, tmp_path: Path
) -> None:
    write_mtp_checkpoint(tmp_path, kind)
    replace_tensors(tmp_path, {f"{second}.input_layernorm.weight": torch.ones(32)})
    with pytest.raises(CheckpointError, match="holds 2 MTP layers"):
        build(tmp_path)
