"""What a manifest says twice must agree: a wrong number is named before anything is loaded.

The checks raise `ValueError`, which pydantic takes from the validators of `manifest.py`.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from specexport.export.engine_spec import EngineSpec
    from specexport.export.manifest import FunctionSpec, GraphSpec, HeadSpec, Manifest, TensorSpec

Shape = tuple[int | str, ...]

_LAYOUTS = {"medusa": "Medusa", "eagle": "EAGLE-1/2", "eagle3": "EAGLE-3", "mtp": "MTP"}
"""How the layouts of each method's heads begin."""


def check_graph(spec: "GraphSpec") -> None:
    """Inputs and outputs are those of a decoder, or of a head's step, of just these sizes."""
    if spec.cache_kinds not in (("key", "value"), ("key",)):
        raise ValueError(
            f"the inputs past_key_values.0.* are {list(spec.cache_kinds)}; expected key and value, "
            "or key alone"
        )
    if spec.tap_width % spec.hidden_size:
        raise ValueError(
            f"output 'hidden_states' is {spec.tap_width} wide, no multiple of hidden_size "
            f"{spec.hidden_size}"
        )
    _compare("input", spec.inputs, _inputs(spec))
    _compare("output", spec.outputs, _outputs(spec))


def check_head(head: "HeadSpec") -> None:
    """There is one kind of graphs, and they fit each other."""
    if (head.step is None) == (head.medusa is None):
        raise ValueError("a head has either the graph step or the graph medusa")
    if not head.taps:
        raise ValueError("taps is empty; a head reads at least one hidden state")
    if head.step is not None and not head.step.is_head:
        raise ValueError("step has no input 'hidden_states', so it is no head's graph")
    if head.medusa is not None:
        shapes = [list(output.shape) for output in head.medusa.outputs]
        if not (head.num_heads and head.vocab_size):
            raise ValueError(
                f"medusa has outputs of shapes {shapes}; expected one of [batch, heads, vocabulary]"
            )
        _check_function("medusa", head.medusa, ("batch",), ("batch", head.num_heads))
    if head.fuse is not None:
        if head.step is None:
            raise ValueError("fuse goes with the graph step alone")
        _check_function("fuse", head.fuse, ("rows",), ("rows",))
        if head.fuse.output_width != head.step.hidden_size:
            raise ValueError(
                f"fuse gives {head.fuse.output_width} numbers, step reads {head.step.hidden_size}"
            )


def check_manifest(manifest: "Manifest") -> None:
    """The graphs fit each other, the method and the vocabulary."""
    target, draft = manifest.target, manifest.draft
    for name, spec in (("target", target), ("draft", draft)):
        if spec is not None and spec.is_head:
            raise ValueError(f"{name} has an input 'hidden_states', so it is a head's graph")
    if outside := [i for i in manifest.eos_token_ids if not 0 <= i < target.vocab_size]:
        raise ValueError(
            f"eos_token_ids holds {outside[0]}; the target has ids 0 to {target.vocab_size - 1}"
        )
    if manifest.head is not None:
        _check_target(manifest.head, target)
        _check_layout(manifest.head, manifest.method.kind)
    if manifest.decide is not None and manifest.decide.vocab_size != target.vocab_size:
        raise ValueError(
            f"decide reads logits of {manifest.decide.vocab_size} tokens, the target gives "
            f"{target.vocab_size}"
        )
    for engine in manifest.engines:
        _check_engine(engine, manifest)


def _check_engine(engine: "EngineSpec", manifest: "Manifest") -> None:
    """Every graph has a plan, made from just this graph."""
    graphs = manifest.graphs
    if engine.plans.keys() != graphs.keys():
        raise ValueError(
            f"{engine.folder} has plans of {sorted(engine.plans)}; the graphs are {sorted(graphs)}"
        )
    for name, plan in engine.plans.items():
        if plan.graph_sha256 != manifest.files[graphs[name].path].sha256:
            raise ValueError(f"{plan.path} was built from another {graphs[name].path}")


def _check_target(head: "HeadSpec", target: "GraphSpec") -> None:
    """The target gives what the head reads, and the head's ids are the target's or mapped."""
    for tap in head.taps:
        if isinstance(tap, int) and not -1 <= tap < target.num_layers:
            raise ValueError(
                f"head.taps holds {tap}; the target has layers 0 to {target.num_layers - 1}"
            )
    needed = len(head.taps) * target.hidden_size
    if not target.tap_width == needed == head.input_width:
        raise ValueError(
            f"{len(head.taps)} hidden states of {target.hidden_size} numbers are {needed}; the "
            f"target's output 'hidden_states' has {target.tap_width or 'none'}, and the head reads "
            f"{head.input_width}"
        )
    if head.token_map is None and head.vocab_size != target.vocab_size:
        raise ValueError(
            f"the head predicts {head.vocab_size} tokens, the target {target.vocab_size}, and "
            "head.token_map is missing, which leads from the first to the second"
        )


def _check_layout(head: "HeadSpec", method: str) -> None:
    """An EAGLE head drafts wrongly as one of another version, though its graphs look alike."""
    expected = _LAYOUTS.get(method, "")
    if not head.layout.startswith(expected):
        raise ValueError(f"method is {method}, but the head is {head.layout!r}")
    if method == "eagle3" and head.fuse is None:
        raise ValueError("head.fuse is missing, which an EAGLE-3 head needs")


def _check_function(name: str, spec: "FunctionSpec", rows: Shape, result: Shape) -> None:
    """One input and one output, each of the given shape but for its width."""
    _compare(f"{name}'s input", spec.inputs, [("hidden_states", (*rows, spec.input_width))])
    if len(spec.outputs) != 1:
        raise ValueError(f"{name} has {len(spec.outputs)} outputs; expected one")
    output = spec.outputs[0].name
    _compare(f"{name}'s output", spec.outputs, [(output, (*result, spec.output_width))])


def _inputs(spec: "GraphSpec") -> Iterator[tuple[str, Shape]]:
    yield "input_ids", ("batch", "query")
    yield "position_ids", ("batch", "query")
    yield "write_indices", ("batch",)
    yield "attention_mask", ("batch", 1, "query", "valid_length")
    yield "logits_indices", ("num_logits",)
    if spec.is_head:
        yield "hidden_states", ("batch", "query", spec.hidden_size)
    yield from _cache(spec, "past_key_values")


def _outputs(spec: "GraphSpec") -> Iterator[tuple[str, Shape]]:
    yield "logits", ("num_logits", spec.vocab_size)
    if spec.is_head:
        yield "recycled_states", ("num_logits", spec.hidden_size)
    elif spec.tap_width:
        yield "hidden_states", ("batch", "query", spec.tap_width)
    yield from _cache(spec, "present")


def _cache(spec: "GraphSpec", prefix: str) -> Iterator[tuple[str, Shape]]:
    shape = ("batch", spec.num_kv_heads, "cache_length", spec.head_dim)
    for layer in range(spec.num_layers):
        for kind in spec.cache_kinds:
            yield f"{prefix}.{layer}.{kind}", shape


def _compare(
    what: str, found: Sequence["TensorSpec"], expected: Iterable[tuple[str, Shape]]
) -> None:
    """Ends at the first of `expected` that is missing, however many there are."""
    shapes = {tensor.name: tensor.shape for tensor in found}
    if len(shapes) != len(found):
        raise ValueError(f"an {what} stands twice")
    for name, shape in expected:
        if name not in shapes:
            raise ValueError(f"{what} {name!r} is missing, which its sizes call for")
        if (came := shapes.pop(name)) != shape:
            raise ValueError(
                f"{what} {name!r} has shape {list(came)}; its sizes call for {list(shape)}"
            )
    if shapes:
        raise ValueError(f"{what} {next(iter(shapes))!r} is none that its sizes call for")
