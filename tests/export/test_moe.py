"""Routing and experts against transformers' own routers and blocks, and the published names."""

import math
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
import torch
import transformers
from numpy.typing import NDArray
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE
from transformers.models.ernie4_5_moe.modeling_ernie4_5_moe import Ernie4_5_MoeSparseMoeBlock
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeMoE
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from specexport.export.config import MoeConfig
from specexport.export.decoder import build_decoder
from specexport.export.families import read_config
from specexport.export.layers import GraphBuilder
from specexport.export.moe import mixture_of_experts, route
from specexport.export.moe_config import read_deepseek_moe, read_ernie_moe, read_qwen3_moe

HIDDEN = 32
SIZES: dict[str, Any] = {"hidden_size": HIDDEN, "moe_intermediate_size": 16}
GROUPED = {**SIZES, "n_routed_experts": 24, "num_experts_per_tok": 4, "first_k_dense_replace": 0}
CLASSES: dict[str, Any] = {
    "qwen3_moe": (transformers.Qwen3MoeConfig, Qwen3MoeSparseMoeBlock, read_qwen3_moe),
    "deepseek_v3": (transformers.DeepseekV3Config, DeepseekV3MoE, read_deepseek_moe),
    "glm4_moe": (transformers.Glm4MoeConfig, Glm4MoeMoE, read_deepseek_moe),
    "ernie4_5_moe": (transformers.Ernie4_5_MoeConfig, Ernie4_5_MoeSparseMoeBlock, read_ernie_moe),
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "softmax": ("qwen3_moe", {**SIZES, "num_experts": 24, "num_experts_per_tok": 4}),
    "softmax, normalised": (
        "qwen3_moe",
        {**SIZES, "num_experts": 24, "num_experts_per_tok": 4, "norm_topk_prob": True},
    ),
    "one expert a token": (
        "qwen3_moe",
        {**SIZES, "num_experts": 5, "num_experts_per_tok": 1, "norm_topk_prob": True},
    ),
    "every expert": ("qwen3_moe", {**SIZES, "num_experts": 4, "num_experts_per_tok": 4}),
    "a single expert": ("qwen3_moe", {**SIZES, "num_experts": 1, "num_experts_per_tok": 1}),
    "sigmoid, groups": ("deepseek_v3", {**GROUPED, "n_group": 6, "topk_group": 2}),
    "groups that must all be used": (
        "deepseek_v3",
        {**GROUPED, "n_group": 12, "topk_group": 2, "norm_topk_prob": False},
    ),
    "all groups kept": ("glm4_moe", {**GROUPED, "n_group": 4, "topk_group": 4}),
    "one group, scaled": (
        "glm4_moe",
        {**GROUPED, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.5},
    ),
    "softmax with a bias": ("ernie4_5_moe", {**SIZES, "moe_num_experts": 24, "moe_k": 4}),
    "a floor under the sum": (
        "ernie4_5_moe",
        {**SIZES, "moe_num_experts": 24, "moe_k": 4, "moe_norm_min": 0.5},
    ),
}


def make_block(case: str) -> tuple[Any, MoeConfig]:
    """transformers' block with random weights, and our reading of its saved config."""
    family, values = CASES[case]
    config_class, block_class, read = CLASSES[family]
    config = config_class(**values)
    torch.manual_seed(0)
    block = block_class(config).eval()
    tensors = [*block.named_parameters(), *block.named_buffers()]
    with torch.no_grad():
        for name, tensor in tensors:
            # Negative biases too: a masked expert must lose to an allowed one below zero.
            is_bias = name.endswith("e_score_correction_bias")
            tensor.copy_(torch.randn_like(tensor) * (1.0 if is_bias else 0.3))
    return block, read(config.to_dict())


def tensors_of(block: Any) -> dict[str, NDArray[np.float32]]:
    """The block's weights under the names of published checkpoints."""
    found = {name: tensor.detach().numpy() for name, tensor in block.state_dict().items()}
    found = {n.replace("gate.moe_statics", "moe_statics"): t for n, t in found.items()}
    gate_up, down = found.pop("experts.gate_up_proj"), found.pop("experts.down_proj")
    for expert, (both, matrix) in enumerate(zip(gate_up, down, strict=True)):
        gate, up = np.split(both, 2)
        for part, weight in (("gate_proj", gate), ("up_proj", up), ("down_proj", matrix)):
            found[f"experts.{expert}.{part}.weight"] = weight
    return found


def run(g: GraphBuilder, x: ir.Value, outputs: list[ir.Value], block: Any, feed: Any) -> list[Any]:
    """Run a graph of one block whose weights are those of `block`."""
    tensors = tensors_of(block)
    for i, output in enumerate(outputs):
        output.name = f"output.{i}"
    graph = g.graph([x], outputs)
    for name, weight in g.weights.items():
        array = tensors[weight.source.removeprefix("mlp.")]
        assert array.shape == weight.shape
        stored = np.ascontiguousarray(array.T if weight.transpose else array)
        graph.initializers[name].const_value = ir.tensor(stored, name=name)
    model = ir.serde.serialize_model(ir.Model(graph, ir_version=11)).SerializeToString()
    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    return list(session.run(None, {"x": feed}))


def graph_input(*shape: str | int) -> ir.Value:
    return ir.Value(name="x", shape=ir.Shape(shape), type=ir.TensorType(ir.DataType.FLOAT))


@pytest.mark.parametrize("case", CASES)
def test_routing_equals_transformers(case: str) -> None:
    block, moe = make_block(case)
    tokens = torch.randn(500, HIDDEN)
    g, x = GraphBuilder("fp32"), graph_input("n", HIDDEN)
    routing = route(g, x, "mlp", HIDDEN, moe)
    ids = g.op("Identity", routing.expert_ids)
    ids.type, routing.weights.type = ir.TensorType(ir.DataType.INT64), x.type
    ids.shape = routing.weights.shape = ir.Shape(["n", moe.experts_per_token])
    found_ids, found = run(g, x, [ids, routing.weights], block, tokens.numpy())
    with torch.inference_mode():
        _, weights, expected_ids = block.gate(tokens)

    def spread(ids: Any, weights: Any) -> Any:  # [N, k], [N, k] -> [N, E]
        return torch.zeros(500, moe.num_experts).scatter(1, torch.as_tensor(ids), weights)

    expected = spread(expected_ids, weights).numpy()
    np.testing.assert_allclose(
        spread(found_ids, torch.from_numpy(found)).numpy(), expected, atol=1e-6, rtol=1e-5
    )
    chosen = {tuple(row) for row in np.sort(found_ids, axis=1).tolist()}
    assert len(chosen) > 1 or moe.experts_per_token == moe.num_experts


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("shape", [(1, 1), (1, 7), (3, 40)])
def test_experts_equal_transformers(case: str, shape: tuple[int, int]) -> None:
    block, moe = make_block(case)
    hidden = torch.randn(*shape, HIDDEN)
    g, x = GraphBuilder("fp32"), graph_input("b", "q", HIDDEN)
    output = mixture_of_experts(g, x, "mlp", HIDDEN, moe, shared_bias=False)
    output.type, output.shape = x.type, x.shape
    (found,) = run(g, x, [output], block, hidden.numpy())
    with torch.inference_mode():
        expected = block(hidden).numpy()
    np.testing.assert_allclose(found, expected, atol=2e-5 * float(np.abs(expected).max()))


def test_all_tokens_may_choose_the_same_experts() -> None:
    block, moe = make_block("sigmoid, groups")
    hidden = torch.randn(1, 1, HIDDEN).expand(2, 9, HIDDEN).contiguous()
    g, x = GraphBuilder("fp32"), graph_input("b", "q", HIDDEN)
    output = mixture_of_experts(g, x, "mlp", HIDDEN, moe, shared_bias=False)
    output.type, output.shape = x.type, x.shape
    (found,) = run(g, x, [output], block, hidden.numpy())
    with torch.inference_mode():
        expected = block(hidden).numpy()
    np.testing.assert_allclose(found, expected, atol=2e-5 * float(np.abs(expected).max()))


# The config.json of deepseek-ai/DeepSeek-V3 and Qwen/Qwen3-30B-A3B (the keys that matter).
DEEPSEEK_V3: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "attention_bias": False,
    "first_k_dense_replace": 3,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
    },
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "v_head_dim": 128,
    "vocab_size": 129280,
}
QWEN3_30B_A3B: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "attention_bias": False,
    "decoder_sparse_step": 1,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "max_position_embeddings": 40960,
    "max_window_layers": 48,
    "mlp_only_layers": [],
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
PUBLISHED_LAYER = {
    "mlp.experts.255.gate_proj.weight": (2048, 7168),
    "mlp.experts.255.up_proj.weight": (2048, 7168),
    "mlp.experts.255.down_proj.weight": (7168, 2048),
    "mlp.gate.weight": (256, 7168),
    "mlp.gate.e_score_correction_bias": (256,),
    "mlp.shared_experts.gate_proj.weight": (2048, 7168),
    "mlp.shared_experts.up_proj.weight": (2048, 7168),
    "mlp.shared_experts.down_proj.weight": (7168, 2048),
    "self_attn.q_a_proj.weight": (1536, 7168),
    "self_attn.q_a_layernorm.weight": (1536,),
    "self_attn.q_b_proj.weight": (24576, 1536),
    "self_attn.kv_a_proj_with_mqa.weight": (576, 7168),
    "self_attn.kv_a_layernorm.weight": (512,),
    "self_attn.kv_b_proj.weight": (32768, 512),
    "self_attn.o_proj.weight": (7168, 16384),
    "input_layernorm.weight": (7168,),
    "post_attention_layernorm.weight": (7168,),
}


@pytest.mark.parametrize(
    ("config", "billions"), [(DEEPSEEK_V3, 671.0), (QWEN3_30B_A3B, 30.5)], ids=["V3", "30B-A3B"]
)
def test_a_published_model_has_the_parameters_of_its_model_card(
    config: dict[str, Any], billions: float
) -> None:
    graph = build_decoder(read_config(config), "bf16", max_length=16)
    shapes = {weight.source: weight.shape for weight in graph.builder.weights.values()}
    assert sum(map(math.prod, shapes.values())) / 1e9 == pytest.approx(billions, abs=0.05)
    if config is DEEPSEEK_V3:
        layer = "model.layers.60."
        found = {n.removeprefix(layer): s for n, s in shapes.items() if n.startswith(layer)}
        assert PUBLISHED_LAYER.items() <= found.items()
        assert len(found) == len(PUBLISHED_LAYER) + 255 * 3
        assert "model.layers.2.mlp.gate_proj.weight" in shapes  # the last dense layer
