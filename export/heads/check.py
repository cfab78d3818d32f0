"""A head's file against its graphs: every tensor is read, and every one that is needed is there."""

from specexport.errors import CheckpointError
from specexport.export.heads.plan import HeadGraphs, RenamedTensors


def check_head_tensors(layout: str, tensors: RenamedTensors, graphs: HeadGraphs) -> None:
    """Raise `CheckpointError` for a missing or unread tensor or one of the wrong shape."""
    names = set(tensors.names())
    needed = {
        weight.source: weight
        for graph in (graphs.step, graphs.fuse, graphs.medusa)
        if graph is not None
        for weight in graph.builder.weights.values()
    }
    if missing := sorted(needed.keys() - names):
        raise CheckpointError(
            f"{tensors.source} lacks {len(missing)} tensor(s) that a head of its kind "
            f"({layout}) needs, first {missing[0]!r}. Is the download complete, and "
            "config.json of this head?"
        )
    if unread := sorted(tensors.renamed[name] for name in names - needed.keys()):
        raise CheckpointError(
            f"{tensors.source} holds {len(unread)} tensor(s) that a head of its kind "
            f"({layout}) does not read, first {unread[0]!r}. Running without them would give "
            "another head: is config.json of this head, and --method the right one?"
        )
    for name, weight in needed.items():
        if (shape := tensors.shape(name)) != weight.shape:
            raise CheckpointError(
                f"{tensors.source}: {tensors.renamed[name]} has shape {list(shape)}; "
                f"{list(weight.shape)} was expected by its config.json and the target's. Is the "
                "head of this target?"
            )
