"""Every producer's way of naming the target's hidden states, as the outputs of its layers."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from specexport.errors import CheckpointError
from specexport.export.decoder import build_decoder
from specexport.export.families import read_config
from specexport.export.heads.taps import read_taps
from specexport.export.huggingface import HuggingFaceCheckpoint
from specexport.export.weights import write_weights
from tests.heads_tiny import load_graph
from tests.tiny import make_model, write_checkpoint

IDS = "eagle_aux_hidden_state_layer_ids"
DEFAULT = (1, 15, 28)  # of 32 layers


@pytest.mark.parametrize(
    ("config", "taps"),
    [
        ({}, DEFAULT),
        ({"eagle_config": {IDS: []}}, DEFAULT),
        ({"eagle_config": {IDS: None}, IDS: None}, DEFAULT),
        # ModelOpt, SpecForge: outputs.
        ({"eagle_config": {IDS: [1, 15, 28]}}, DEFAULT),
        ({"eagle_config": {IDS: [0, 10, 31]}}, (0, 10, 31)),
        # speculators, vLLM: what enters a layer.
        ({IDS: [2, 16, 29]}, DEFAULT),
        ({IDS: [1, 10, 20]}, (0, 9, 19)),
        ({IDS: [0, 10, 32]}, (-1, 9, 31)),
        # AngelSlim: outputs.
        ({"aux_hidden_states_layer_ids": [3, 10, 20]}, (3, 10, 20)),
        # Converted between the two without renumbering: the default triple is recognised …
        ({IDS: [1, 15, 28]}, DEFAULT),
        ({"eagle_config": {IDS: [2, 16, 29]}}, DEFAULT),
        # … and the last layer's output has no other number.
        ({"eagle_config": {IDS: [20, 26, 32]}}, (19, 25, 31)),
        # Any number of layers.
        ({"eagle_config": {IDS: [5]}}, (5,)),
    ],
)
def test_ids_become_outputs_of_layers(config: dict[str, Any], taps: tuple[int, ...]) -> None:
    assert read_taps(config, 32) == taps


@pytest.mark.parametrize(
    ("config", "num_layers", "message"),
    [
        ({}, 6, r"layers \[1, 2, 2\] \(the default of EAGLE-3\); the target has layers 0 to 5"),
        ({}, 2, r"layers \[1, 0, -2\]"),
        ({"eagle_config": {IDS: [3, 2]}}, 32, "the list must rise"),
        ({"eagle_config": {IDS: [3, 3]}}, 32, "the list must rise"),
        ({IDS: [-1, 3]}, 32, r"layers \[-2, 2\]"),
        ({IDS: [2, 33]}, 32, r"layers \[1, 32\]"),
        ({IDS: "2,16,29"}, 32, "is '2,16,29'; expected layer numbers such as"),
        ({IDS: [2.0]}, 32, r"is \[2\.0\]; expected layer numbers"),
    ],
)
def test_ids_that_the_target_does_not_have_are_refused(
    config: dict[str, Any], num_layers: int, message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        read_taps(config, num_layers)


@pytest.mark.parametrize("ids", [None, [0, 8]])
def test_the_targets_graph_gives_the_states_that_the_loaders_collect(
    ids: list[int] | None, tmp_path: Path
) -> None:
    """Loaders collect what enters layers 2, n//2 and n - 3, or the boundaries that are listed."""
    checkpoint = HuggingFaceCheckpoint(
        write_checkpoint(tmp_path / "hf", "llama", num_hidden_layers=8), "tiny"
    )
    config = read_config(checkpoint.config)
    graph = build_decoder(config, "fp32", 16, read_taps({IDS: ids} if ids else {}, 8))
    write_weights(graph, checkpoint, tmp_path / "model.weights")
    tokens = torch.tensor([[5, 9, 200, 31, 7]])
    model = make_model("llama", num_hidden_layers=8)
    last: list[Any] = []  # transformers gives the last layer's output after the final norm only
    model.model.norm.register_forward_pre_hook(lambda _, inputs: last.append(inputs[0]))
    with torch.inference_mode():
        states = [*model(tokens, output_hidden_states=True).hidden_states[:8], last[0]]
    expected = torch.cat([states[i] for i in ids or (2, 4, 5)], dim=-1)
    cache = np.zeros((1, config.num_kv_heads, 16, config.head_dim), np.float32)
    feed = {
        "input_ids": tokens.numpy(),
        "position_ids": np.arange(5)[None],
        "write_indices": np.zeros(1, np.int64),
        "attention_mask": np.tril(np.ones((1, 1, 5, 5), bool)),
        "logits_indices": np.array([4]),
        **{f"past_key_values.{i}.{kind}": cache for i in range(8) for kind in ("key", "value")},
    }
    (found,) = load_graph(graph, tmp_path / "model.onnx").run(["hidden_states"], feed)
    # fp32 on both sides; states are of the order of ten.
    np.testing.assert_allclose(found, expected, atol=5e-5)
