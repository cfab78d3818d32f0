"""The head of a bundle, of whichever method, against the same head in PyTorch."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast, get_args

from specexport.errors import CheckpointError
from specexport.export.checkpoint import open_checkpoint
from specexport.export.config import DecoderConfig
from specexport.export.families import read_config
from specexport.export.manifest import FloatType, HeadSpec, Manifest
from specexport.validation.head_logits import compare_medusa, compare_steps
from specexport.validation.reference import Reference
from specexport.validation.report import HeadReport
from specexport.validation.source import find_source
from specexport.validation.torch_heads import StepHead, TorchEagle, TorchEagle3, TorchMedusa
from specexport.validation.torch_mtp import TorchMtp


@dataclass(frozen=True, slots=True)
class HeadCheck:
    """What is compared with what."""

    bundle: Path
    manifest: Manifest
    target: str
    """The target's checkpoint."""
    head: str | None
    """The head's; None: where the bundle was built from."""
    tolerance: float

    def run(
        self, reference: Reference, texts: Sequence[Sequence[int]]
    ) -> tuple[HeadReport | None, str | None]:
        """The report, or why there is none; neither for a bundle without a head."""
        spec = self.manifest.head
        if spec is None:
            return None, None
        if self.manifest.target.is_quantized or _weight_type(spec) not in get_args(FloatType):
            return None, "its bundle holds matrices of integers or fp8"
        if self.manifest.method.kind == "mtp":
            return self._run_mtp(spec, texts)
        recorded = self.manifest.provenance.head_checkpoint or ""
        source = find_source(self.head, recorded, "--head-checkpoint")
        target, weight_type = read_config(open_checkpoint(self.target).config), _weight_type(spec)
        if self.manifest.method.kind == "medusa":
            medusa = TorchMedusa(reference, source, target, weight_type)
            return compare_medusa(self.bundle, spec, medusa, texts, self.tolerance), None
        head = self._eagle(reference, source, target, weight_type)
        return compare_steps(self.bundle, spec, head, texts, self.tolerance), None

    def _run_mtp(
        self, spec: HeadSpec, texts: Sequence[Sequence[int]]
    ) -> tuple[HeadReport | None, str | None]:
        if self.manifest.provenance.head_checkpoint:
            return None, "transformers loads no MTP layer that lies apart from its target"
        try:
            mtp = TorchMtp(self.target, _weight_type(spec))
        except CheckpointError as error:  # a family whose layer transformers does not have
            return None, str(error)
        return compare_steps(self.bundle, spec, mtp, texts, self.tolerance), None

    def _eagle(
        self, reference: Reference, source: str, target: DecoderConfig, weight_type: FloatType
    ) -> StepHead:
        if self.manifest.method.kind == "eagle":
            return TorchEagle(reference, source, target, weight_type)
        return TorchEagle3(reference, source, target, weight_type)


def _weight_type(spec: HeadSpec) -> FloatType:
    """Of a head whose matrices are no integers."""
    graph = spec.step or spec.medusa
    assert graph is not None
    return cast(FloatType, graph.weight_type)
