"""The decide graph of a bundle, beside its target."""

from pathlib import Path

import onnx_ir as ir

from specexport.export.decide.graph import build_decide
from specexport.export.manifest import DecideSpec
from specexport.export.parts import TARGET_FOLDER, tensor_spec

DECIDE = f"{TARGET_FOLDER}/decide.onnx"


def write_decide(bundle: Path, vocab_size: int) -> DecideSpec:
    """Write the graph into `bundle`, and say what the manifest says of it."""
    import onnx

    model = build_decide(vocab_size).model
    ir.save(model, bundle / DECIDE)
    onnx.checker.check_model(str(bundle / DECIDE))
    return DecideSpec(
        path=DECIDE,
        inputs=tuple(map(tensor_spec, model.graph.inputs)),
        outputs=tuple(map(tensor_spec, model.graph.outputs)),
    )
