"""What the manifest says of engines that were built ahead of time: plans, and what they fit."""

from collections.abc import Mapping
from typing import Literal, Self

from pydantic import Field, model_validator

from specexport.export.methods import Frozen

Backend = Literal["tensorrt-rtx", "tensorrt"]
FloatType = Literal["fp32", "fp16", "bf16"]
CACHE_STEP = 128
"""Cache lengths are multiples of this: TensorRT wants addresses that are multiples of 256 bytes."""


class SizeRange(Frozen):
    """The sizes of one dimension that a plan takes, and the one it is fastest at."""

    min: int
    opt: int
    max: int

    @model_validator(mode="after")
    def _check_order(self) -> Self:
        if not 1 <= self.min <= self.opt <= self.max:
            raise ValueError(
                f"sizes {self.min}, {self.opt}, {self.max} are no range; expected "
                "1 <= min <= opt <= max"
            )
        return self

    def __str__(self) -> str:
        return f"{self.min} to {self.max}" if self.min < self.max else str(self.min)


class ShapeProfile(Frozen):
    """One optimisation profile: the sizes of all dynamic dimensions."""

    name: str
    """step: verifying drafts and plain decoding; prefill: reading prompts."""
    sizes: dict[str, SizeRange]
    """By the dimension's name in the graph's inputs."""

    def holds(self, sizes: Mapping[str, int]) -> bool:
        """Whether it takes inputs of these sizes."""
        ranges = self.sizes
        return sizes.keys() == ranges.keys() and all(
            ranges[name].min <= size <= ranges[name].max for name, size in sizes.items()
        )

    def __str__(self) -> str:
        sizes = (f"{name.replace('_', ' ')} {size}" for name, size in self.sizes.items())
        return f"{self.name}: {', '.join(sizes)}"


class PlanSpec(Frozen):
    """The plan of one graph, and how its build went."""

    path: str = Field(description="plan file, relative to the bundle")
    size_bytes: int
    sha256: str
    key: str
    """SHA-256 of all that the plan was made of: the graph's form, its weights, the options."""
    graph_sha256: str
    """Of the bundle's ONNX file."""
    cache_length: int
    """S of the caches; 0 for a graph without."""
    profiles: tuple[ShapeProfile, ...]
    num_layers: int
    """Of the network before TensorRT fused it."""
    build_time_s: float
    peak_memory_mb: int
    """Main memory of the process that built it, at the most so far; 0: not known."""


class EngineSpec(Frozen):
    """The plans of a bundle's graphs for one library and some GPUs."""

    backend: Backend
    library_version: str
    gpus: tuple[str, ...]
    """Compute capabilities: sm89, …"""
    precision: FloatType
    """Of products, attention and caches."""
    weight_streaming: bool
    plans: dict[str, PlanSpec]
    """By the graph's name: target, draft, head, fuse, medusa, decide."""

    @property
    def folder(self) -> str:
        """Where its plans lie, relative to the bundle."""
        return f"engines/{self.backend}-{'-'.join(self.gpus)}-{self.library_version}"
