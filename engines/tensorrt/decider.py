"""The target's decide graph as a plan: it reads logits where the target's plan left them."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from specexport.engines.cuda import CudaStream
from specexport.engines.step import DecideInput, DecideOutput
from specexport.engines.tensorrt.file import PlanFile
from specexport.engines.tensorrt.loaded import LoadedPlan, bind
from specexport.engines.tensorrt.staging import Dims, Staging
from specexport.export.manifest import TensorSpec

_LOGITS = "logits"


class Decider:
    """Runs after the target on the same stream, so no logits cross to the host."""

    def __init__(self, stream: CudaStream, file: PlanFile, tensors: tuple[TensorSpec, ...]) -> None:
        """`tensors` are the graph's inputs and outputs. Raises as `LoadedPlan` does."""
        self._profile = file.plan.profiles[0]
        self._inputs = {t.name: t for t in tensors if t.name in _names(DecideInput)}
        self._outputs = _names(DecideOutput)
        self._loaded = LoadedPlan(stream, file)
        # What is usual; a step whose options change more logits makes room for them first.
        usual = {name: size.opt for name, size in self._profile.sizes.items()}
        staged = [tensor for tensor in tensors if tensor.name != _LOGITS]
        self._staging = Staging(stream, staged, usual)
        self._logits = next(tensor for tensor in tensors if tensor.name == _LOGITS)
        self._address = 0

    def make_contexts(self) -> None:
        """After all other memory is allocated."""
        self._loaded.make_contexts()

    def takes(self, decide: DecideInput) -> bool:
        """Whether the plan was built for what is asked; if not, the host decides."""
        return self._profile.holds(self._dims(decide))

    def enqueue(self, decide: DecideInput, logits_address: int) -> DecideOutput:
        """Decide on the logits at that address; the output may be read after `synchronize`."""
        dims = self._dims(decide)
        if self._staging.reserve(dims) or logits_address != self._address:
            self._loaded.unbind()
            self._address = logits_address
        for name in self._inputs:
            self._staging.upload(name, getattr(decide, name), dims)
        self._loaded.execute(0, tuple(dims.values()), lambda context: self._bind(context, dims))
        return DecideOutput(*(self._staging.download(name, dims) for name in self._outputs))

    def close(self) -> None:
        """Free the plan."""
        self._loaded.close()

    def _dims(self, decide: DecideInput) -> Dims:
        """The sizes of the named dimensions, as the arrays have them."""
        dims: dict[str, int] = {}
        for name, tensor in self._inputs.items():
            sizes = zip(tensor.shape, getattr(decide, name).shape, strict=True)
            dims |= {dim: size for dim, size in sizes if isinstance(dim, str)}
        return dims

    def _bind(self, context: Any, dims: Mapping[str, int]) -> bool:  # noqa: ANN401 - the library has no types
        num_rows, vocab_size = self._logits.shape
        rows = dims[num_rows] if isinstance(num_rows, str) else num_rows
        shapes = self._staging.shapes(list(self._inputs), dims) | {_LOGITS: (rows, int(vocab_size))}
        return bind(context, shapes, {**self._staging.addresses, _LOGITS: self._address})


def _names(kind: type[DecideInput] | type[DecideOutput]) -> list[str]:
    return [field.name for field in fields(kind)]
