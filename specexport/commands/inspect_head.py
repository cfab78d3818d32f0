"""What `specexport inspect` shows of drafting: its shape, its rule of acceptance, its head."""

from collections.abc import Sequence

from pydantic import BaseModel
from rich.markup import escape
from rich.table import Table

from specexport.export.manifest import FINAL_NORM, HeadSpec, Manifest, Tap
from specexport.export.methods import DynamicTreeSpec, LosslessAcceptance, Method, StaticTreeSpec


def drafting_rows(manifest: Manifest) -> dict[str, str]:
    """How the bundle drafts and accepts, in words."""
    rows = {"method": f"{manifest.method.kind}{_values(manifest.method, 'tree')}"}
    if shape := _shape(manifest.method):
        rows["drafts"] = shape
    if manifest.lookup:
        rows["lookup first"] = f"{manifest.lookup.kind}{_values(manifest.lookup)}"
    rule = manifest.acceptance
    rows["acceptance"] = (
        "lossless: the output has the target's distribution"
        if isinstance(rule, LosslessAcceptance)
        else f"LOSSY: {rule.kind}{_values(rule)}, not the target's distribution"
    )
    if head := manifest.head:
        rows["head"] = escape(head.layout)
        rows["head reads"] = taps_in_words(head.taps)
        rows["head predicts"] = _vocabulary(head, manifest.target.vocab_size)
    return rows


def tensor_table(head: HeadSpec) -> Table:
    """Each tensor of the head's checkpoint and what it is in the graphs."""
    title = f"head: {len(head.tensors)} tensors of the checkpoint, all of them used"
    table = Table(title=title, title_justify="left")
    table.add_column("in the checkpoint", overflow="fold")
    table.add_column("in the graphs", overflow="fold")
    for file, name in head.tensors.items():
        table.add_row(escape(file), "the same" if name == file else escape(name))
    return table


def taps_in_words(taps: Sequence[Tap]) -> str:
    """The target's hidden states that a head reads."""
    words = {FINAL_NORM: "the final norm's output", -1: "the embedding"}
    named = [words[tap] for tap in taps if tap in words]
    layers = [str(tap) for tap in taps if tap not in words]
    if layers:
        plural = "s" if len(layers) > 1 else ""
        named.append(f"the output{plural} of layer{plural} {_list(layers)} (counted from 0)")
    return f"the target's hidden states: {_list(named)}"


def _shape(method: Method) -> str:
    """Nothing for a method that drafts chains alone."""
    if "tree" not in type(method).model_fields:
        return ""
    tree = getattr(method, "tree")  # noqa: B009 - not every method has one
    if isinstance(tree, StaticTreeSpec):
        depth = max(map(len, tree.choices))
        paths = " ".join(str(list(choice)) for choice in tree.choices)
        return escape(f"a tree of {len(tree.choices)} nodes, {depth} deep: {paths}")
    if isinstance(tree, DynamicTreeSpec):
        return (
            f"a tree of the {tree.num_nodes} likeliest nodes, up to {tree.depth} deep, "
            f"{tree.top_k} paths followed"
        )
    return f"a chain of {method.num_speculative_tokens} tokens"


def _vocabulary(head: HeadSpec, target_vocab_size: int) -> str:
    outputs = (head.step or head.medusa).outputs  # type: ignore[union-attr] # one of them is there
    size = next(tensor.shape[-1] for tensor in outputs if tensor.name == "logits")
    if head.token_map is None:
        return f"the target's {target_vocab_size} tokens"
    return f"{size} of the target's {target_vocab_size} tokens ({head.token_map})"


def _values(model: BaseModel, *without: str) -> str:
    values = model.model_dump(exclude={"kind", *without})
    return f" ({', '.join(f'{key} {value}' for key, value in values.items())})" if values else ""


def _list(words: Sequence[str]) -> str:
    """`a`, `a and b`, `a, b and c`."""
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)
