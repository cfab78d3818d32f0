"""A plan of a bundle before it is loaded: whether it takes what is asked of it, and fits the GPU."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specexport.engines.plan import build_command
from specexport.engines.step import Profile
from specexport.errors import ConfigError
from specexport.export.engine_spec import EngineSpec, PlanSpec


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

    def largest(self, size: str) -> int:
        """The most that a profile takes of the dimension of that name."""
        return max(profile.sizes[size].max for profile in self.plan.profiles)

    def check(self, profile: Profile) -> None:
        """Raise `ConfigError` with the command that builds it larger, if it takes too little."""
        length = profile.max_length + profile.max_nodes + profile.max_query
        limits = {
            "requests": (profile.max_slots, self.largest("batch"), "--max-slots"),
            "query tokens of a request": (
                profile.max_query,
                self.largest("query"),
                "--step-tokens",
            ),
        }
        for what, (asked, built, option) in limits.items():
            if asked > built:
                self._refuse(f"{asked} {what}", str(built), f"{option} {asked}")
        if length > self.plan.cache_length:
            asked_for = (
                f"a cache of {length} tokens (text {profile.max_length}, drafts "
                f"{profile.max_nodes}, a step {profile.max_query})"
            )
            self._refuse(asked_for, str(self.plan.cache_length), "--step-tokens, larger")

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

    def _refuse(self, asked: str, built: str, option: str) -> None:
        raise ConfigError(
            f"{self.plan.path} was built for at most {built}, and {asked} were asked for. Load the "
            f"bundle with less, or build: {build_command(self.bundle, self.engine)} {option}"
        )
