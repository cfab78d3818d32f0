"""A whole benchmark: the results, and what figures need beside them."""

import platform
import sys
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from specexport import __version__
from specexport.bench.figures import Drafting
from specexport.bench.plan import Settings
from specexport.bench.results import LoadResult, Point
from specexport.engines.backend import open_backend
from specexport.export.manifest import Manifest

SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True)
class Environment:
    """Where figures come from."""

    model: str
    method: str
    """How the variants draft that do."""
    bundle: str
    machine: str
    versions: dict[str, str]
    arguments: tuple[str, ...]
    """Of the command line."""
    time: str

    @classmethod
    def of(cls, bundle: Path, manifest: Manifest, settings: Settings) -> "Environment":
        """Of this process on this machine."""
        own: str = manifest.method.kind
        if manifest.lookup is not None:
            own = f"{manifest.lookup.kind} + {own}"
        return cls(
            model=f"{Path(manifest.provenance.checkpoint).name}, {manifest.target.stored_as}",
            method=settings.method or own,
            bundle=str(bundle),
            machine=open_backend(settings.engine, bundle, manifest, settings.num_threads).machine,
            versions={
                "specexport": __version__,
                "Python": platform.python_version(),
                **{name: version(name) for name in ("numpy", "tokenizers")},
            },
            arguments=tuple(sys.argv[1:]),
            time=f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
        )


@dataclass(frozen=True, slots=True)
class Report:
    """All that `bench` has to tell."""

    environment: Environment
    settings: Settings
    mean_prompt_tokens: float
    results: tuple[LoadResult, ...]

    @property
    def workload(self) -> str:
        """One line for people."""
        settings = self.settings
        return (
            f"{settings.num_requests} requests of {self.mean_prompt_tokens:.0f} prompt tokens "
            f"(mean), up to {settings.max_tokens} output tokens; rounds: {settings.num_rounds}"
        )

    def as_dict(self) -> dict[str, Any]:
        """For a program to read; times in seconds."""
        prompts = str(self.settings.prompts or "shipped with specexport")
        return {
            "schema_version": SCHEMA_VERSION,
            **asdict(self.environment),
            "settings": asdict(self.settings) | {"prompts": prompts},
            "mean_prompt_tokens": self.mean_prompt_tokens,
            "loads": [_load_dict(result) for result in self.results],
        }


def _load_dict(result: LoadResult) -> dict[str, Any]:
    load = result.load
    return {
        "kind": load.kind,
        **asdict(load),  # type: ignore[call-overload]
        "variants": [_point_dict(point) for point in result.points],
    }


def _point_dict(point: Point) -> dict[str, Any]:
    return {
        "variant": point.variant,
        **asdict(point.figures),
        "speedup": point.speedup,
        "lossless": point.is_lossless,
        "greedy_requests_compared": point.num_compared,
        "greedy_requests_different": point.num_different,
        "drafting": _drafting_dict(point.drafting),
        "rounds": [asdict(figures) for figures in point.rounds],
    }


def _drafting_dict(drafting: Drafting) -> dict[str, Any]:
    acceptance = drafting.acceptance
    return {
        "output_tokens": drafting.num_tokens,
        "target_steps": drafting.num_steps,
        "tokens_per_step": drafting.tokens_per_step,
        "drafts": acceptance.num_drafts,
        "draft_nodes": acceptance.num_nodes,
        "mean_draft_length": drafting.mean_draft_length,
        "acceptance_length": acceptance.length,
        "acceptance_rate": acceptance.rate,
        "acceptance_rate_per_position": acceptance.rate_per_position,
        "proposed_per_position": acceptance.proposed,
        "accepted_per_position": acceptance.accepted,
    }
