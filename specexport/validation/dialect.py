"""Whether TensorRT would take the graphs of a bundle: rules alone, nothing is built."""

from pathlib import Path

import onnx_ir as ir

from specexport.export.manifest import Manifest
from specexport.export.tensorrt.form import TensorRTForm
from specexport.export.tensorrt.lint import lint
from specexport.validation.report import DialectReport


def check_dialect(bundle: Path, manifest: Manifest) -> DialectReport:
    """The findings in the TensorRT form of every graph; they fail a bundle with engines alone."""
    findings = []
    for name, spec in manifest.graphs.items():
        model = ir.load(bundle / spec.path)
        TensorRTForm(manifest.target.max_length)(model)
        findings += [f"{name}: {finding}" for finding in lint(model)]
    return DialectReport(
        num_graphs=len(manifest.graphs),
        findings=tuple(findings),
        passed=not (manifest.engines and findings),
    )
