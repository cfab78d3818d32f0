"""Data sets of tiny targets, computed with transformers and written as training reads them."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from specexport.export.checkpoint import open_checkpoint
from specexport.export.manifest import Tap, hash_file
from specexport.training.identity import identify
from specexport.training.samples import DatasetSpec, Recipe, ShardEntry
from tests.cycle import ORDER, teach_target
from tests.tiny import VOCAB_SIZE, make_model, write_checkpoint

NUM_LAYERS = 8
TAPS: tuple[Tap, ...] = (1, 3, 4, "norm")
TOP_K = 8
_TARGET: dict[str, Any] = {"num_hidden_layers": NUM_LAYERS, "attention_bias": True}


def cycle_target(folder: Path) -> tuple[Path, Any]:
    """A target that goes through `ORDER`: its checkpoint and transformers' model."""
    path = write_checkpoint(folder / "target", "llama", edit=teach_target, **_TARGET)
    model = make_model("llama", **_TARGET)
    teach_target(model)
    return path, model


def random_target(folder: Path) -> tuple[Path, Any]:
    """Random weights: its states depend on all of the text."""
    path = write_checkpoint(folder / "target", "llama", num_hidden_layers=NUM_LAYERS)
    return path, make_model("llama", num_hidden_layers=NUM_LAYERS)


def cycle_texts(num_texts: int, length: int = 24, seed: int = 0) -> list[list[int]]:
    """Pieces of `ORDER`, from random places on."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(VOCAB_SIZE, (num_texts,), generator=generator).tolist()
    return [[ORDER[(start + i) % VOCAB_SIZE] for i in range(length)] for start in starts]


def random_texts(lengths: Sequence[int], seed: int = 0) -> list[list[int]]:
    """Any tokens."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(256, (length,), generator=generator).tolist() for length in lengths]


def write_dataset(
    folder: Path,
    model: Any,
    texts: Sequence[Sequence[int]],
    *,
    num_prompt: int = 4,
    num_shards: int = 3,
    taps: tuple[Tap, ...] = TAPS,
    state_type: Callable[[torch.Tensor], torch.Tensor] = torch.Tensor.half,
) -> Path:
    """Of `model`, whose checkpoint lies beside the folder.

    Each fourth text is held out; the first `num_prompt` tokens of each are a prompt.
    """
    folder.mkdir(parents=True)
    shards = []
    for number in range(num_shards):
        part = texts[number::num_shards]
        path = folder / f"{number}.safetensors"
        save_file(_tensors(model, part, taps, num_prompt, state_type), path)
        entry = ShardEntry(
            path=path.name,
            file=hash_file(path),
            sequences_sha256="0",
            lengths=tuple(len(text) for text in part),
            held_out=tuple(i for i in range(len(part)) if i % 4 == 0),
        )
        shards.append(entry)
    spec = DatasetSpec(
        identity=identify(open_checkpoint(folder.parent / "target")),
        vocab_size=VOCAB_SIZE,
        hidden_size=model.config.hidden_size,
        taps=taps,
        state_type="fp16",
        top_k=TOP_K,
        num_tokens=sum(map(len, texts)),
        num_answer_tokens=sum(len(text) - num_prompt for text in texts),
        recipe=Recipe(sources={}, max_length=99, shard_bytes=99),
        shards=tuple(shards),
        is_complete=True,
    )
    (folder / "dataset.json").write_text(spec.model_dump_json())
    return folder


def _tensors(
    model: Any,
    texts: Sequence[Sequence[int]],
    taps: tuple[Tap, ...],
    num_prompt: int,
    state_type: Callable[[torch.Tensor], torch.Tensor],
) -> dict[str, torch.Tensor]:
    parts: dict[str, list[torch.Tensor]] = {}
    for text in texts:
        with torch.inference_mode():
            found = model(torch.tensor([list(text)]), output_hidden_states=True)
        probs, ids = found.logits[0].softmax(-1).topk(TOP_K)
        # transformers' last hidden state is the one after the final norm.
        states = [found.hidden_states[-1 if tap == "norm" else int(tap) + 1][0] for tap in taps]
        sample = {
            "token_ids": torch.tensor(list(text)),
            "is_answer": torch.arange(len(text)) >= num_prompt,
            "states": state_type(torch.cat(states, dim=-1)),
            "top_ids": ids,
            "top_probs": probs,
        }
        for name, tensor in sample.items():
            parts.setdefault(name, []).append(tensor)
    return {name: torch.cat(tensors) for name, tensors in parts.items()}
