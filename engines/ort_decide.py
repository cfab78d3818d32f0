"""The decide graph of a bundle on ONNX Runtime."""

from dataclasses import fields
from typing import Any

from specexport.engines.step import DecideInput, DecideOutput, Floats
from specexport.errors import EngineError

_OUTPUTS = [field.name for field in fields(DecideOutput)]


class OrtDecider:
    """Runs the graph on logits that are there."""

    def __init__(self, session: Any) -> None:  # noqa: ANN401 - onnxruntime has no types
        """`session` has the graph loaded."""
        self._session = session

    def run(self, logits: Floats, decide: DecideInput) -> DecideOutput:
        """Decide on a step; raises `EngineError` with ONNX Runtime's reason if it fails."""
        feeds = {field.name: getattr(decide, field.name) for field in fields(decide)}
        try:
            found = self._session.run(_OUTPUTS, {"logits": logits, **feeds})
        except Exception as error:
            raise EngineError(f"ONNX Runtime failed in the decide graph: {error}") from None
        return DecideOutput(*found)
