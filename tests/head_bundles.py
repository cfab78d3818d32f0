"""Bundles of tiny models with a drafting head of every method, and what each head should draft."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from specexport.export.build import BuildOptions, build
from specexport.export.methods import HeadMethod, MedusaMethod
from tests import tiny_eagle, tiny_eagle3, tiny_medusa
from tests.cycle import (
    Source,
    added,
    scale_of,
    teach_eagle,
    teach_eagle3,
    teach_medusa,
    teach_mtp,
    teach_target,
)
from tests.heads_tiny import Lender, Tensors, write_head
from tests.tiny import VOCAB_SIZE, make_model, write_checkpoint
from tests.tiny_eagle3 import draft_ids
from tests.tiny_mtp import PUBLISHED, write_mtp_checkpoint

NUM_LAYERS = 8
_TARGET: dict[str, Any] = {"num_hidden_layers": NUM_LAYERS, "attention_bias": True}

Logits = torch.Tensor  # [V]


@dataclass(frozen=True)
class HeadBundle:
    """A bundle, what it was built from, and its head in plain torch."""

    path: Path
    checkpoint: Path
    target: Any
    """transformers' model."""
    logits: Callable[[tuple[int, ...], tuple[int, ...]], Logits]
    """Of a text and a drafted path below it: what the head predicts next, over the target's ids."""


@dataclass(frozen=True)
class _Matrices:
    embedding: torch.Tensor
    lm_head: torch.Tensor


@dataclass(frozen=True)
class _Model:
    """A target of transformers, and its hidden states."""

    model: Any

    @classmethod
    def make(cls, folder: Path, noise: float) -> "_Model":
        edit = partial(teach_target, noise=noise)
        write_checkpoint(folder / "target", "llama", edit=edit, **_TARGET)
        model = make_model("llama", **_TARGET)
        edit(model)
        return cls(model)

    @property
    def matrices(self) -> Lender:
        tables = (self.model.get_input_embeddings(), self.model.get_output_embeddings())
        return _Matrices(*(table.weight.detach().double() for table in tables))

    def states(self, token_ids: tuple[int, ...]) -> list[torch.Tensor]:
        """[n, H] each: the embedding, every layer's output but the last, the final norm's."""
        with torch.inference_mode():
            found = self.model.model(torch.tensor([token_ids]), output_hidden_states=True)
        return [state[0] for state in found.hidden_states]


def to_target(logits: torch.Tensor, ids: torch.Tensor | None) -> Logits:
    """Logits of a reduced vocabulary over the target's."""
    if ids is None:
        return logits
    found = torch.full((VOCAB_SIZE,), -torch.inf, dtype=logits.dtype)
    found[ids] = logits
    return found


def stepwise(
    states: Callable[[tuple[int, ...]], torch.Tensor],
    run: Callable[[list[int], torch.Tensor], tuple[torch.Tensor, torch.Tensor]],
    ids: torch.Tensor | None = None,
) -> Callable[[tuple[int, ...], tuple[int, ...]], Logits]:
    """A step head's logits: the text's rows with the target's states, the path's with its own."""

    @cache
    def rows(text: tuple[int, ...], path: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
        if path:
            _, recycled = computed(text, path[:-1])
            features = torch.cat([rows(text, path[:-1])[0], recycled[-1:]])
        else:
            features = states(text[:-1])
        return features, torch.tensor([*text[1:], *path])

    @cache
    def computed(text: tuple[int, ...], path: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
        features, tokens = rows(text, path)
        return run(tokens.tolist(), features)

    return lambda text, path: to_target(computed(text, path)[0][-1], ids)


def _medusa(folder: Path, source: Source, noise: float, *, reduced: bool = False) -> HeadBundle:
    target = _Model.make(folder, noise)
    scale = scale_of(added(NUM_LAYERS))
    heads = [teach_medusa(w, depth, noise, scale) for depth, w in enumerate(tiny_medusa.weights())]
    ids = draft_ids() if reduced else None
    if reduced:
        heads = [{**head, "out": head["out"][draft_ids()]} for head in heads]
        tensors = {**tiny_medusa.vllm(heads), "token_map": draft_ids()}
    else:
        tensors = tiny_medusa.classic(heads)
    head = write_head(folder / "head", {}, tensors)

    def logits(text: tuple[int, ...], path: tuple[int, ...]) -> Logits:
        state = target.states(text[:-1])[-1][-1:]
        found = torch.from_numpy(tiny_medusa.reference(heads, state))
        return to_target(found[0, len(path)], ids)

    options = BuildOptions(MedusaMethod(num_speculative_tokens=3), head=str(head))
    return _build(folder, options, target.model, logits)


def _eagle(folder: Path, source: Source, noise: float) -> HeadBundle:
    target = _Model.make(folder, noise)
    edit = partial(teach_eagle, source=source, num_layers=NUM_LAYERS, noise=noise)
    case = replace(tiny_eagle.CASES["of Qwen2"], edit=edit)
    w, config, matrices = case.weights(), case.full_config, target.matrices
    head = write_head(folder / "head", config, w)
    logits = stepwise(
        lambda text: target.states(text)[-1],
        lambda ids, features: tiny_eagle.reference(w, config, matrices, ids, features),
    )
    options = BuildOptions(HeadMethod(kind="eagle"), head=str(head))
    return _build(folder, options, target.model, logits)


def _eagle3(folder: Path, source: Source, noise: float, *, producer: str) -> HeadBundle:
    target = _Model.make(folder, noise)
    case = tiny_eagle3.CASES[producer]
    edit = partial(teach_eagle3, case, source=source, num_layers=NUM_LAYERS, noise=noise)
    w, matrices = replace(case, edit=edit).weights(), target.matrices
    case = replace(case, edit=lambda random: w)
    head = case.write(folder / "head")

    def features(text: tuple[int, ...]) -> torch.Tensor:
        states = target.states(text)
        return tiny_eagle3.fuse(w, torch.cat([states[tap + 1] for tap in (1, 3, 4)], dim=-1))

    logits = stepwise(
        features,
        lambda ids, features: tiny_eagle3.reference(case, matrices, ids, features),
        draft_ids() if case.reduced else None,
    )
    options = BuildOptions(HeadMethod(kind="eagle3"), head=str(head))
    return _build(folder, options, target.model, logits)


def _mtp(folder: Path, source: Source, noise: float, *, kind: str) -> HeadBundle:
    published = PUBLISHED[kind]

    def edit_own(own: Tensors) -> Tensors:
        return teach_mtp(
            own,
            source,
            hidden_first=published.hidden_first,
            reads_normed=published.reads_normed,
            noise=noise,
        )

    reference = write_mtp_checkpoint(
        folder / "target", kind, edit=partial(teach_target, noise=noise), edit_own=edit_own
    )
    logits = stepwise(lambda text: reference.target_states(list(text)), reference.run)
    options = BuildOptions(HeadMethod(kind="mtp"))
    return _build(folder, options, reference.model, logits)


def _build(
    folder: Path, options: BuildOptions, model: Any, logits: Callable[..., Logits]
) -> HeadBundle:
    build(str(folder / "target"), folder / "bundle", options)
    return HeadBundle(folder / "bundle", folder / "target", model, logits)


MAKERS: Mapping[str, Callable[[Path, Source, float], HeadBundle]] = {
    "medusa": _medusa,
    "medusa, reduced vocabulary": partial(_medusa, reduced=True),
    "eagle": _eagle,
    **{
        f"eagle3, {producer}": partial(_eagle3, producer=producer)
        for producer in (
            "SafeAILab, narrower than the target",
            "SpecForge",
            "SpecForge, EAGLE-3.1",
            "ModelOpt, the target's output matrix",
            "ModelOpt, latent attention",
            "speculators, two layers",
        )
    },
    **{f"mtp, {kind}": partial(_mtp, kind=kind) for kind in PUBLISHED},
}
"""By name: a folder, what the head predicts from, and noise → a bundle."""
