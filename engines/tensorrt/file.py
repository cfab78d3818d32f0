"""A plan of a bundle before it is loaded: whether it takes what is asked, and fits the GPU."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specexport.engines.plan import build_command
from specexport.engines.step import Profile
from specexport.errors import ConfigError
from specexport.export.engine_spec import EngineSpec, PlanSpec
from specexport.export.manifest import GraphSpec

ALIGNMENT = 256
"""Bytes; TensorRT wants addresses that are multiples."""


@dataclass(frozen=True, slots=True)
class PlanFile:
    """A plan, and the library that runs it."""

    module: Any
    """tensorrt_rtx or tensorrt."""
    bundle: Path
    engine: EngineSpec
    plan: PlanSpec

    @property
    def path(self) -> Path:
        """Of the file."""
        return self.bundle / self.plan.path

    @property
    def library(self) -> str:
        """For people: name and version."""
        return f"{self.engine.backend} {self.engine.library_version}"

    @property
    def weight_bytes(self) -> int:
        """About what its weights and kernels take; streamed ones get what is left."""
        return 0 if self.engine.weight_streaming else self.plan.size_bytes

    def largest(self, size: str) -> int:
        """The most that a profile takes of the dimension of that name."""
        return max(profile.sizes[size].max for profile in self.plan.profiles)

    def check(self, spec: GraphSpec, profile: Profile) -> None:
        """Raise `ConfigError` with the command that builds it larger, if it takes too little."""
        if profile.max_length > spec.max_length:
            raise ConfigError(
                f"A cache of {profile.max_length} tokens was asked for, but {spec.path} was built "
                f"for {spec.max_length}. Lower --max-length, or build again with a larger one."
            )
        slots, query, nodes = profile.max_slots, profile.max_query, profile.max_nodes
        self._refuse_above("batch", slots, "requests", f"--max-slots {slots}")
        self._refuse_above("query", query, "query tokens of a request", f"--step-tokens {query}")
        length = profile.max_length + nodes + query
        if length > self.plan.cache_length:
            self._refuse(
                self.plan.cache_length,
                f"a cache of {length} tokens (text {profile.max_length}, drafts {nodes}, and a "
                f"step of {query})",
                f"--step-tokens {query + nodes}",
            )

    def check_alignment(self, slot_bytes: int) -> None:
        """Raise `ConfigError` unless each slot's part of a cache can be bound."""
        if slot_bytes % ALIGNMENT:
            raise ConfigError(
                f"{self.plan.path} has caches of {self.plan.cache_length} tokens, whose slots do "
                f"not begin at multiples of {ALIGNMENT} bytes. Build it again: "
                f"{build_command(self.bundle, self.engine)}"
            )

    def check_memory(self, free_bytes: int, needs: Mapping[str, int]) -> None:
        """Raise `ConfigError` if what is `needs` in bytes, by name, is more than is free."""
        if sum(needs.values()) <= free_bytes:
            return
        parts = ", ".join(f"{name} {size / 1e9:.2f}" for name, size in needs.items())
        streaming = "" if self.engine.weight_streaming else ", or with --weight-streaming"
        raise ConfigError(
            f"{self.plan.path} needs {sum(needs.values()) / 1e9:.2f} GB of the GPU's memory "
            f"({parts}), and {free_bytes / 1e9:.2f} GB are free. Load fewer requests "
            f"(--max-slots), build the bundle with a smaller --max-length, or the engine "
            f"with smaller --max-slots and --step-tokens{streaming}."
        )

    def _refuse_above(self, size: str, asked: int, what: str, option: str) -> None:
        if asked > self.largest(size):
            self._refuse(self.largest(size), f"{asked} {what}", option)

    def _refuse(self, built: int, asked: str, option: str) -> None:
        raise ConfigError(
            f"{self.plan.path} was built for at most {built}, and {asked} were asked for. Load the "
            f"bundle with less (--max-slots, --max-length, -k, step_tokens), or build: "
            f"{build_command(self.bundle, self.engine)} {option}"
        )
