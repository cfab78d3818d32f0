"""The multi-token-prediction layer inside a target's checkpoint → the plan of a step head."""

from dataclasses import replace

import numpy as np

from specexport.errors import CheckpointError
from specexport.export.checkpoint import Checkpoint
from specexport.export.config import DecoderConfig
from specexport.export.decoder import EMBEDDING, LM_HEAD, Layer
from specexport.export.heads.mtp_graph import MtpHead
from specexport.export.heads.mtp_layouts import LAYOUTS, MtpLayout, MtpNames
from specexport.export.heads.plan import HeadPlan, RenamedTensors
from specexport.export.layer_check import require_layers
from specexport.export.mtp_tensors import mtp_tensors
from specexport.export.weights import UNREAD_SUFFIXES


def plan_mtp(checkpoint: Checkpoint, target: DecoderConfig) -> HeadPlan:
    """Recognise the MTP layer of `checkpoint`, whose target is `target`.

    Raises `CheckpointError` where there is none, or more than one; the plan's `build` does where a
    tensor is missing, unused or of the wrong shape.
    """
    layout, layer = find_mtp_layer(checkpoint, target.num_layers)
    names = layout.names.numbered(layer)
    files = mtp_tensors(checkpoint.names(), target.num_layers)
    files |= {name for name in checkpoint.names() if name.startswith(f"{names.block}.")}
    files = {name for name in files if not name.endswith(UNREAD_SUFFIXES)}
    names, copies, notes = _borrow(checkpoint, target, names, files)
    tensors = RenamedTensors(checkpoint, {name: name for name in files - copies})
    config = _layer_config(target, names, files)
    require_layers(tensors, config, [Layer(names.block, 0)])
    head = MtpHead(layout, names, tensors, config)
    taps = (layout.tap(target.num_layers),)
    return HeadPlan(layout.name, taps, head.tensors, head.build, notes=notes)


def find_mtp_layer(checkpoint: Checkpoint, num_target_layers: int) -> tuple[MtpLayout, int]:
    """The layout, and the number of the one layer; raises `CheckpointError` without just one."""
    for layout in LAYOUTS:
        layers = layout.layers(checkpoint.names(), num_target_layers)
        if len(layers) > 1:
            raise CheckpointError(
                f"{checkpoint.source} holds {len(layers)} MTP layers ({layout.name}). Only one, "
                "which drafts all tokens, is supported: take another --method."
            )
        if layers:
            return layout, layers[0]
    if files := mtp_tensors(checkpoint.names(), num_target_layers):
        raise CheckpointError(
            f"{checkpoint.source} holds {len(files)} tensor(s) of an MTP module of unknown layout, "
            f"first {min(files)!r}. Known: {', '.join(layout.name for layout in LAYOUTS)}."
        )
    announced = checkpoint.config.get("num_nextn_predict_layers")
    raise CheckpointError(
        f"{checkpoint.source} holds no multi-token-prediction layer"
        + (f", though its config.json announces {announced}" if announced else "")
        + ". Many uploads leave it out: take the original checkpoint, or another --method."
    )


def _borrow(
    checkpoint: Checkpoint, target: DecoderConfig, names: MtpNames, files: set[str]
) -> tuple[MtpNames, set[str], tuple[str, ...]]:
    """The names without those whose tensor is the target's own; the copies; notes about both.

    The technical report shares embedding and output matrix. The files hold copies, or nothing;
    where one differs from the target's, it is used.
    """
    originals = {
        names.embedding: EMBEDDING,
        names.lm_head: EMBEDDING if target.tied_embeddings else LM_HEAD,
    }
    own, copies, notes = set(), set(), []
    for module, original in originals.items():
        name = f"{module}.weight"
        if name not in files:
            continue
        if np.array_equal(checkpoint.tensor(name), checkpoint.tensor(original)):
            copies.add(name)
            notes.append(f"{name} equals {original}: stored once.")
        else:
            own.add(module)
            notes.append(f"{name} differs from {original}: the MTP layer uses its own.")
    names = replace(
        names,
        embedding=names.embedding if names.embedding in own else None,
        lm_head=names.lm_head if names.lm_head in own else None,
    )
    return names, copies, tuple(notes)


def _layer_config(target: DecoderConfig, names: MtpNames, files: set[str]) -> DecoderConfig:
    """The target's, of one layer, which has experts where the file has them."""
    has_experts = any(name.startswith(f"{names.block}.mlp.experts.") for name in files)
    moe = target.moe if has_experts else None
    return replace(
        target,
        num_layers=1,
        moe=replace(moe, dense_layers=frozenset()) if moe is not None else None,
    )
