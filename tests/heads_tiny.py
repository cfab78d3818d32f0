"""Small random heads, a tiny target to lend them its weights, and their step graphs."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from specexport.export.config import DecoderConfig
from specexport.export.decoder import build_decoder
from specexport.export.families import read_config
from specexport.export.graph_io import DecoderGraph
from specexport.export.heads.plan import HeadPlan
from specexport.export.huggingface import HuggingFaceCheckpoint
from specexport.export.weights import write_weights
from tests.head_runner import HeadRunner
from tests.tiny import VOCAB_SIZE, make_model, write_checkpoint

Tensors = dict[str, torch.Tensor]
Array = NDArray[Any]

CAPACITY = 32
HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, HEAD_DIM, EPS = 32, 40, 4, 2, 16, 1e-5
LAYER_CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": HIDDEN,
    "intermediate_size": INTERMEDIATE,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "num_hidden_layers": 1,
    "rms_norm_eps": EPS,
    "max_position_embeddings": 256,
    "rope_theta": 5000.0,
    "vocab_size": VOCAB_SIZE,
    "tie_word_embeddings": False,
}


class Lender(Protocol):
    """A target's matrices, fp64."""

    @property
    def embedding(self) -> torch.Tensor: ...  # [V, H]
    @property
    def lm_head(self) -> torch.Tensor: ...  # [V, H]


@dataclass(frozen=True)
class Target:
    """A tiny Llama, written, and its graph with weights: the lender of embedding and lm_head."""

    folder: Path
    checkpoint: HuggingFaceCheckpoint
    config: DecoderConfig
    graph: DecoderGraph
    embedding: torch.Tensor  # [V, H], fp64
    lm_head: torch.Tensor


def make_target(folder: Path, **overrides: Any) -> Target:
    """Eight layers unless told otherwise: enough for EAGLE-3's three default taps to differ."""
    options: dict[str, Any] = {"num_hidden_layers": 8, **overrides}
    checkpoint = HuggingFaceCheckpoint(write_checkpoint(folder / "hf", "llama", **options), "tiny")
    config = read_config(checkpoint.config)
    graph = build_decoder(config, "fp32", CAPACITY)
    write_weights(graph, checkpoint, folder / "target.weights")
    model = make_model("llama", **options)
    return Target(
        folder,
        checkpoint,
        config,
        graph,
        model.get_input_embeddings().weight.detach().double(),
        model.get_output_embeddings().weight.detach().double(),
    )


class Random:
    """Seeded random weights: norms around one, everything else around zero."""

    def __init__(self, seed: int = 0) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def matrix(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self._generator) * 0.2

    def norm(self, size: int) -> torch.Tensor:
        return torch.rand(size, generator=self._generator) + 0.5


def layer_weights(
    random: Random,
    name: str,
    *,
    size: int = HIDDEN,
    input_size: int = HIDDEN,
    head_dim: int = HEAD_DIM,
    biases: Sequence[str] = (),
) -> Tensors:
    """One Llama layer without its input norm; `biases` such as "q_proj" get one."""
    widths = {
        "self_attn.q_proj": (HEADS * head_dim, input_size),
        "self_attn.k_proj": (KV_HEADS * head_dim, input_size),
        "self_attn.v_proj": (KV_HEADS * head_dim, input_size),
        "self_attn.o_proj": (size, HEADS * head_dim),
        "mlp.gate_proj": (INTERMEDIATE, size),
        "mlp.up_proj": (INTERMEDIATE, size),
        "mlp.down_proj": (size, INTERMEDIATE),
    }
    weights = {f"{name}.{key}.weight": random.matrix(*shape) for key, shape in widths.items()}
    for key, (rows, _) in widths.items():
        if key.split(".")[1] in biases:
            weights[f"{name}.{key}.bias"] = random.matrix(rows)
    weights[f"{name}.post_attention_layernorm.weight"] = random.norm(size)
    return weights


def write_head(
    folder: Path, config: dict[str, Any] | None, tensors: Tensors, kind: str = "safetensors"
) -> Path:
    """Write a head's directory; `kind` is safetensors, bin, or either with "-shards"."""
    folder.mkdir(parents=True)
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    stem, suffix = {"safetensors": ("model", "safetensors"), "bin": ("pytorch_model", "bin")}[
        kind.removesuffix("-shards")
    ]
    if not kind.endswith("-shards"):
        _save(tensors, folder / f"{stem}.{suffix}")
        return folder
    names = sorted(tensors)
    shards = {f"{stem}-{i + 1:05}-of-00002.{suffix}": names[i::2] for i in range(2)}
    for file, held in shards.items():
        _save({name: tensors[name] for name in held}, folder / file)
    weight_map = {name: file for file, held in shards.items() for name in held}
    (folder / f"{stem}.{suffix}.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def _save(tensors: Tensors, path: Path) -> None:
    if path.suffix == ".safetensors":
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)
    else:
        torch.save(tensors, path)


# The equations, in fp64, over whole sequences: nothing of a cache, a mask input or a graph.


def rms_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS) * weight.double()


def linear(w: Tensors, name: str, x: torch.Tensor) -> torch.Tensor:
    bias = w.get(f"{name}.bias")
    y = x @ w[f"{name}.weight"].double().T
    return y if bias is None else y + bias.double()


def attention(
    w: Tensors, name: str, x: torch.Tensor, positions: torch.Tensor, config: dict[str, Any]
) -> torch.Tensor:
    """Causal grouped-query attention of one sequence: [L, width] -> [L, H]."""
    rotary = LlamaRotaryEmbedding(LlamaConfig(**{"head_dim": None, **config}))
    cos, sin = (table[0].double() for table in rotary(x.float()[None], positions[None]))

    def heads(kind: str) -> torch.Tensor:  # [heads, L, D]
        y = linear(w, f"{name}.{kind}_proj", x).view(len(x), -1, cos.shape[-1])
        norm = w.get(f"{name}.{kind}_norm.weight")
        return (y if norm is None else rms_norm(y, norm)).transpose(0, 1)

    def rotate(y: torch.Tensor) -> torch.Tensor:
        a, b = y.chunk(2, dim=-1)
        rotated: torch.Tensor = y * cos + torch.cat((-b, a), dim=-1) * sin
        return rotated

    query, key, value = rotate(heads("q")), rotate(heads("k")), heads("v")
    groups = len(query) // len(key)
    key, value = key.repeat_interleave(groups, 0), value.repeat_interleave(groups, 0)
    scores = query @ key.transpose(1, 2) / query.shape[-1] ** 0.5
    future = torch.ones(len(x), len(x), dtype=torch.bool).triu(1)
    probs = scores.masked_fill(future, -torch.inf).softmax(-1)
    return linear(w, f"{name}.o_proj", (probs @ value).transpose(0, 1).flatten(1))


def mlp(w: Tensors, name: str, x: torch.Tensor) -> torch.Tensor:
    gate = torch.nn.functional.silu(linear(w, f"{name}.gate_proj", x))
    return linear(w, f"{name}.down_proj", gate * linear(w, f"{name}.up_proj", x))


class StepSession:
    """The graphs of a head, the step graph loaded for some rows side by side."""

    def __init__(self, plan: HeadPlan, target: Target, folder: Path, rows: int = 1) -> None:
        """Files get the name of `folder`."""
        self.graphs = plan.build(target.graph.builder, "fp32", CAPACITY)
        assert self.graphs.step is not None
        # In the target's folder, where the weights lie that it borrows.
        path = target.folder / f"{folder.name}.onnx"
        write_weights(self.graphs.step, plan.tensors, path.with_suffix(".weights"))
        save_graph(self.graphs.step, path)
        self._runner = HeadRunner(path, rows)

    def run(
        self, token_ids: Sequence[Sequence[int]], features: Sequence[torch.Tensor]
    ) -> tuple[Array, Array]:
        """Append ragged rows; logits and recycled states after the last token of each: [B, …]."""
        found = self._runner.run_ragged(token_ids, [states.numpy() for states in features])
        logits, recycled = (np.stack([row[i][-1] for row in found]) for i in range(2))
        return logits, recycled


def open_graph(graph: DecoderGraph, plan: HeadPlan, folder: Path, name: str) -> Any:
    """Write a graph of a head with its weights into `folder` and load it."""
    write_weights(graph, plan.tensors, folder / f"{name}.weights")
    return load_graph(graph, folder / f"{name}.onnx")


def load_graph(graph: DecoderGraph, path: Path) -> Any:
    """Save a graph whose weights are written, check it and load it."""
    save_graph(graph, path)
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3  # caches fed and fetched are copied, which it warns of
    return ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def save_graph(graph: DecoderGraph, path: Path) -> None:
    """Save a graph whose weights are written, and check it."""
    ir.save(graph.model, path)
    onnx.checker.check_model(str(path), full_check=True)
