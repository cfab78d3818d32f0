"""What TensorRT would refuse in a bundle's graphs is told, and fails a bundle with engines."""

import shutil
from pathlib import Path

import onnx_ir as ir

from specexport.export.engine_spec import EngineSpec
from specexport.export.manifest import read_manifest
from specexport.validation.dialect import check_dialect

ENGINE = EngineSpec(
    backend="tensorrt-rtx",
    library_version="1.7",
    gpus=("sm89",),
    precision="fp16",
    weight_streaming=False,
    plans={},
)


def test_findings_are_told_and_fail_only_a_bundle_with_engines(
    tiny_bundle: Path, tmp_path: Path
) -> None:
    manifest = read_manifest(tiny_bundle)
    assert check_dialect(tiny_bundle, manifest).findings == ()
    (tmp_path / "target").mkdir()
    shutil.copy(tiny_bundle / "target/decide.onnx", tmp_path / "target")
    shutil.copy(tiny_bundle / "target/model.weights", tmp_path / "target")
    model = ir.load(tiny_bundle / "target/model.onnx")
    attentions = [node for node in model.graph if node.op_type == "Attention"]
    attentions[1].attributes.add(ir.AttrFloat32("softcap", 30.0))
    ir.save(model, tmp_path / "target/model.onnx")
    report = check_dialect(tmp_path, manifest)
    (finding,) = report.findings
    assert finding.startswith("target: Attention ")
    assert "has softcap 30" in finding
    assert report.passed
    assert not check_dialect(tmp_path, manifest.model_copy(update={"engines": (ENGINE,)})).passed
