"""How a bundle is loaded."""

from dataclasses import dataclass
from typing import Literal, get_args

from specexport.engines.available import EngineName
from specexport.errors import ConfigError
from specexport.export.methods import (
    DynamicTreeSpec,
    LosslessAcceptance,
    StaticTreeSpec,
    TopAcceptance,
    TypicalAcceptance,
)

MethodName = Literal["none", "ngram", "suffix", "draft", "medusa", "eagle", "eagle3", "mtp"]
LookupName = Literal["none", "ngram", "suffix"]
_RANGES = {
    "max_slots": (1, 4096),
    "max_waiting": (1, 2**31 - 1),
    "step_tokens": (1, 65536),
    "prefix_cache_mb": (0, 2**20),
    "max_length": (2, 2**31 - 1),
    "num_speculative_tokens": (0, 256),
    "num_threads": (0, 1024),
}
_NAMES = {
    "engine": get_args(EngineName),
    "method": (*get_args(MethodName), None),
    "lookup": (*get_args(LookupName), None),
}


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """How a bundle is loaded; None takes what the bundle says."""

    engine: EngineName = "onnxruntime"
    """What runs the graphs: onnxruntime on the CPU, the others on a GPU (docs/gpu.md)."""
    max_slots: int = 8
    """Requests that run at once."""
    max_waiting: int = 1024
    """Requests that may wait for one of these."""
    max_length: int | None = None
    """Prompt plus output tokens of a request."""
    method: MethodName | None = None
    lookup: LookupName | None = None
    """Asked first; the method drafts where it finds nothing."""
    tree: StaticTreeSpec | DynamicTreeSpec | None = None
    acceptance: LosslessAcceptance | TypicalAcceptance | TopAcceptance | None = None
    """All but the lossless one change the output's distribution."""
    num_speculative_tokens: int | None = None
    """Draft length K; 0 decodes plainly."""
    adaptive: bool | None = None
    """Choose each draft's size, up to K, by what it costs and what is accepted.

    None: yes, unless K, a tree or a lossy acceptance rule is asked for.
    """
    step_tokens: int = 256
    """Tokens computed in one step: prompts take what decoding and its drafts leave of them."""
    prefix_cache_mb: int = 512
    """Memory for cache entries of earlier texts, for prompts that begin alike; 0 keeps none."""
    num_threads: int = 0
    """0: one for each usable CPU."""
    decide_in_graph: bool | None = None
    """Verify and draw in the bundle's decide graph (docs/decide.md); None: on a GPU alone."""
    verify_files: bool = True
    """Check every file against the manifest's hashes first."""

    @property
    def is_adaptive(self) -> bool:
        """What `adaptive` comes to."""
        if self.adaptive is not None:
            return self.adaptive
        is_lossless = isinstance(self.acceptance, LosslessAcceptance | None)
        return self.num_speculative_tokens is None and self.tree is None and is_lossless

    def __post_init__(self) -> None:
        for name, (least, most) in _RANGES.items():
            value = getattr(self, name)
            if value is None and name in ("max_length", "num_speculative_tokens"):
                continue
            if type(value) is not int or not least <= value <= most:
                raise ConfigError(
                    f"{name} is {value!r}; it must be a whole number from {least} to {most}."
                )
        for name, names in _NAMES.items():
            if (value := getattr(self, name)) not in names:
                known = ", ".join(str(known) for known in names)
                raise ConfigError(f"{name} is {value!r}; it must be one of {known}.")
        for name in ("adaptive", "decide_in_graph"):
            if not isinstance(value := getattr(self, name), bool | None):
                raise ConfigError(f"{name} is {value!r}; it must be True, False or None.")
