"""Embedding and output matrix of an EAGLE head: its own, or the target's."""

import numpy as np
import onnx_ir as ir

from specexport.errors import CheckpointError
from specexport.export import decoder
from specexport.export.checkpoint import Tensor, TensorSource
from specexport.export.config import DecoderConfig
from specexport.export.heads.names import EMBEDDING, LM_HEAD
from specexport.export.heads.plan import RenamedTensors
from specexport.export.layers import GraphBuilder


def check_embedding(tensors: RenamedTensors, hidden_size: int, target: DecoderConfig) -> None:
    """Raise `CheckpointError` unless every token of the target has an embedding of that size."""
    if EMBEDDING not in tensors.renamed:
        if hidden_size != target.hidden_size:
            raise CheckpointError(
                f"{tensors.source} has no embedding ('embed_tokens.weight'), and its hidden_size "
                f"{hidden_size} is not the target's {target.hidden_size}, whose embedding it "
                "could use otherwise. Is the file complete, and the head of this target?"
            )
    elif (rows := tensors.matrix_shape(EMBEDDING)[0]) < target.vocab_size:
        raise CheckpointError(
            f"{tensors.source}: {tensors.renamed[EMBEDDING]} has {rows} rows, but the target has "
            f"{target.vocab_size} tokens. Is the head of this target?"
        )


def borrow_equal_embedding(
    tensors: RenamedTensors, config: DecoderConfig, lent: TensorSource | None
) -> tuple[RenamedTensors, tuple[str, ...]]:
    """Without an embedding that is the target's (`lent`) to the bit, and a note of that.

    Many heads ship a copy of it, which need not be stored twice.
    """
    if lent is None or EMBEDDING not in tensors.renamed or _output_is_tied(config, tensors):
        return tensors, ()
    if tensors.shape(EMBEDDING) != lent.shape(decoder.EMBEDDING):
        return tensors, ()
    if not _equal(tensors.tensor(EMBEDDING), lent.tensor(decoder.EMBEDDING)):
        return tensors, ()
    return tensors.without(EMBEDDING), ("The head's embedding is the target's: stored once.",)


def _equal(a: Tensor, b: Tensor) -> bool:
    """Equal numbers, also of different types; compared in blocks, since embeddings are large."""
    block = 4096
    return all(
        np.array_equal(a[i : i + block].astype(np.float32), b[i : i + block].astype(np.float32))
        for i in range(0, len(a), block)
    )


def embedding_table(g: GraphBuilder, tensors: RenamedTensors, size: int) -> ir.Value:
    """The head's own [V, H] where it is stored, else the target's."""
    if EMBEDDING in tensors.renamed:
        return g.matrix(EMBEDDING, tensors.matrix_shape(EMBEDDING)[0], size)
    return g.shared(decoder.EMBEDDING)


def target_lm_head(g: GraphBuilder, target: DecoderConfig) -> ir.Value:
    """The target's output matrix [V, H], which is its embedding where these are tied."""
    return g.shared(decoder.EMBEDDING if target.tied_embeddings else decoder.LM_HEAD)


def num_outputs(
    config: DecoderConfig, stated: int | None, tensors: RenamedTensors, target: DecoderConfig
) -> int:
    """V_draft: rows of the matrix that `output_matrix` gives; `stated` is config.json's number."""
    if LM_HEAD in tensors.renamed:
        rows, _ = tensors.matrix_shape(LM_HEAD)
        if stated not in (None, rows):
            raise CheckpointError(
                f"{tensors.source}: config.json says draft_vocab_size {stated}, but "
                f"{tensors.renamed[LM_HEAD]} has {rows} rows. Restore the published files."
            )
        return rows
    if _output_is_tied(config, tensors):
        return tensors.matrix_shape(EMBEDDING)[0]
    if stated not in (None, target.vocab_size) or config.hidden_size != target.hidden_size:
        raise CheckpointError(
            f"{tensors.source} has no output matrix ('lm_head.weight'), and the target's "
            f"[{target.vocab_size}, {target.hidden_size}] does not fit its "
            f"[{stated or target.vocab_size}, {config.hidden_size}]. Is the file complete?"
        )
    return target.vocab_size


def output_matrix(
    g: GraphBuilder, config: DecoderConfig, tensors: RenamedTensors, target: DecoderConfig
) -> ir.Value:  # [V_draft, H]
    """The head's own where it is stored, else its tied embedding, else the target's."""
    if LM_HEAD in tensors.renamed:
        return g.matrix(LM_HEAD, config.vocab_size, config.hidden_size)
    if _output_is_tied(config, tensors):
        return embedding_table(g, tensors, config.hidden_size)
    return target_lm_head(g, target)


def _output_is_tied(config: DecoderConfig, tensors: RenamedTensors) -> bool:
    """config.json ties the output to an embedding that the head has, and no matrix contradicts."""
    names = tensors.renamed
    return config.tied_embeddings and EMBEDDING in names and LM_HEAD not in names
