"""The multi-token-prediction layer inside a target's checkpoint → the plan of a step head."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from specexport.errors import CheckpointError
from specexport.export.checkpoint import Checkpoint
from specexport.export.config import DecoderConfig
from specexport.export.decoder import EMBEDDING, LM_HEAD
from specexport.export.heads.mtp_graph import TARGET_FINAL_NORM, MtpHead
from specexport.export.heads.mtp_layouts import (
    LAYOUTS,
    OWN_EMBEDDING,
    OWN_LM_HEAD,
    MtpLayout,
    is_mtp_tensor,
)
from specexport.export.heads.plan import HeadPlan, RenamedTensors
from specexport.export.layers import GraphBuilder, Weight


def plan_mtp(checkpoint: Checkpoint, target: DecoderConfig) -> HeadPlan:
    """Recognise the MTP layer of `checkpoint`, whose target is `target`.

    Raises `CheckpointError` where there is none, or more than one, or where a tensor is missing,
    unused or of the wrong shape.
    """
    found = _find(checkpoint, target)
    stored = _stored_vocabularies(checkpoint, target, found)
    own = {matrix.module for matrix in stored if not matrix.is_copy}
    head = MtpHead(
        layout=found.layout,
        config=_layer_config(checkpoint, target, found),
        own_embedding=OWN_EMBEDDING in own,
        own_lm_head=OWN_LM_HEAD in own,
    )
    weights = _weights(head, target)
    _check_tensors(checkpoint, target, found, weights, stored)
    names = {weight.source: found.name(weight.source) for weight in weights}
    return HeadPlan(
        layout=found.layout.name,
        taps=(found.layout.tap(target.num_layers),),
        tensors=RenamedTensors(checkpoint, names),
        build=head.build,
        notes=tuple(matrix.note for matrix in stored),
    )


@dataclass(frozen=True, slots=True)
class _FoundLayer:
    """An MTP layer of a checkpoint."""

    layout: MtpLayout
    number: int

    def name(self, graph_name: str) -> str:
        """The checkpoint's name of one of its tensors."""
        return self.layout.checkpoint_name(graph_name, self.number)


@dataclass(frozen=True, slots=True)
class _StoredVocabulary:
    """An embedding or output matrix that is stored again for the MTP layer."""

    module: str
    name: str
    target_name: str
    is_copy: bool

    @property
    def note(self) -> str:
        """What became of it, for people."""
        if self.is_copy:
            return f"{self.name} equals {self.target_name}: it is stored once."
        return f"{self.name} differs from {self.target_name}: the MTP layer uses its own."


def _find(checkpoint: Checkpoint, target: DecoderConfig) -> _FoundLayer:
    names = list(checkpoint.names())
    for layout in LAYOUTS:
        layers = layout.layers(names, target.num_layers)
        if len(layers) > 1:
            raise CheckpointError(
                f"{checkpoint.source} holds {len(layers)} MTP layers ({layout.name}). Only one, "
                "which drafts all tokens, is supported: take another --method."
            )
        if layers:
            return _FoundLayer(layout, layers[0])
    raise CheckpointError(
        f"{checkpoint.source} holds no multi-token-prediction layer, neither as layer "
        f"{target.num_layers} nor under another known name. Many uploads leave it out: take the "
        "original checkpoint, or another --method."
    )


def _stored_vocabularies(
    checkpoint: Checkpoint, target: DecoderConfig, found: _FoundLayer
) -> list[_StoredVocabulary]:
    """The technical report shares both matrices; the files hold copies, which may differ."""
    names = set(checkpoint.names())
    lm_head = EMBEDDING if target.tied_embeddings else LM_HEAD
    stored = []
    for module, target_name in ((OWN_EMBEDDING, EMBEDDING), (OWN_LM_HEAD, lm_head)):
        if module not in found.layout.modules.values():
            continue
        name = found.name(f"{module}.weight")
        if name in names:
            is_copy = np.array_equal(checkpoint.tensor(name), checkpoint.tensor(target_name))
            stored.append(_StoredVocabulary(module, name, target_name, is_copy))
    return stored


def _layer_config(
    checkpoint: Checkpoint, target: DecoderConfig, found: _FoundLayer
) -> DecoderConfig:
    """The target's config with this one layer, which has experts where the file has them."""
    return replace(target, num_layers=1)


def _weights(head: MtpHead, target: DecoderConfig) -> list[Weight]:
    """What the step graph will read of the checkpoint, found by building it once."""
    lender = GraphBuilder("fp32")
    for name in (EMBEDDING, LM_HEAD):
        lender.matrix(name, target.vocab_size, target.hidden_size)
    lender.vector(TARGET_FINAL_NORM, target.hidden_size)
    step = head.build(lender, "fp32", max_length=1).step
    assert step is not None
    return list(step.builder.weights.values())


def _check_tensors(
    checkpoint: Checkpoint,
    target: DecoderConfig,
    found: _FoundLayer,
    weights: Iterable[Weight],
    stored: Iterable[_StoredVocabulary],
) -> None:
    """Raise `CheckpointError` for a missing, unused or misshapen tensor of the MTP layer."""
    names = set(checkpoint.names())
    shapes = {found.name(weight.source): weight.shape for weight in weights}
    if missing := sorted(set(shapes) - names):
        raise CheckpointError(
            f"{checkpoint.source} lacks {len(missing)} tensor(s) of its MTP layer "
            f"({found.layout.name}), first {missing[0]!r}. Is the download complete?"
        )
    known = {*shapes, *(matrix.name for matrix in stored)}
    if unused := sorted(n for n in names - known if is_mtp_tensor(n, target.num_layers)):
        raise CheckpointError(
            f"{checkpoint.source} holds {len(unused)} tensor(s) of an MTP layer that its equation "
            f"({found.layout.name}) does not use, first {unused[0]!r}. Drafting without them would "
            "be wrong: is this a layer of another kind?"
        )
    for name, expected in shapes.items():
        if (shape := checkpoint.shape(name)) != expected:
            raise CheckpointError(
                f"{name} has shape {list(shape)}; the target's config.json calls for "
                f"{list(expected)}. The weights and config.json are of different models."
            )
