"""Embedding and output matrix of an EAGLE head: its own, or the target's."""

import onnx_ir as ir

from specexport.errors import CheckpointError
from specexport.export import decoder
from specexport.export.config import DecoderConfig
from specexport.export.heads.names import EMBEDDING
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
    elif (rows := tensors.shape(EMBEDDING)[0]) < target.vocab_size:
        raise CheckpointError(
            f"{tensors.source}: {tensors.renamed[EMBEDDING]} has {rows} rows, but the target has "
            f"{target.vocab_size} tokens. Is the head of this target?"
        )


def embedding_table(g: GraphBuilder, tensors: RenamedTensors, size: int) -> ir.Value:
    """The head's own [V, H] where it is stored, else the target's."""
    if EMBEDDING in tensors.renamed:
        return g.matrix(EMBEDDING, tensors.shape(EMBEDDING)[0], size)
    return g.shared(decoder.EMBEDDING)


def target_lm_head(g: GraphBuilder, target: DecoderConfig) -> ir.Value:
    """The target's output matrix [V, H], which is its embedding where these are tied."""
    return g.shared(decoder.EMBEDDING if target.tied_embeddings else decoder.LM_HEAD)
