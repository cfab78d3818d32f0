"""How a bundle drafts, and which rule accepts: a part of its manifest."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

DraftLength = Annotated[int, Field(ge=1, le=256)]


class Frozen(BaseModel):
    """A part of the manifest: never changed, nothing unknown in it."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class NgramMethod(Frozen):
    """Draft the continuation of the latest earlier occurrence of the last n tokens."""

    kind: Literal["ngram"] = "ngram"
    num_speculative_tokens: DraftLength = 6
    max_ngram: int = Field(default=4, ge=1, le=32)
    min_ngram: int = Field(default=2, ge=1, le=32)


class SuffixMethod(Frozen):
    """Draft the continuation of the longest suffix that occurred earlier, the longer the more."""

    kind: Literal["suffix"] = "suffix"
    num_speculative_tokens: DraftLength = 8
    min_match: int = Field(default=1, ge=1, le=1024, description="shortest match that counts")
    factor: int = Field(
        default=2, ge=1, le=256, description="draft tokens for each token of the match"
    )
    store_tokens: int = Field(
        default=0,
        ge=0,
        le=100_000_000,
        description="tokens kept of earlier requests' outputs, matched too",
    )


class StaticTreeSpec(Frozen):
    """Drafts are trees of one shape."""

    kind: Literal["static"] = "static"
    choices: tuple[tuple[Annotated[int, Field(ge=0)], ...], ...]
    """Each node's path from the text: the rank of every token on it, 0 the likeliest."""


class DynamicTreeSpec(Frozen):
    """Drafts are trees of the paths that the drafter finds likeliest (EAGLE-2)."""

    kind: Literal["dynamic"] = "dynamic"
    depth: int = Field(default=5, ge=1, le=64, description="levels of drafted tokens")
    top_k: int = Field(default=4, ge=1, le=64, description="paths followed, and children of each")
    num_nodes: int = Field(default=12, ge=1, le=1024, description="nodes verified")


TreeSpec = Annotated[StaticTreeSpec | DynamicTreeSpec, Field(discriminator="kind")]


class DraftMethod(Frozen):
    """Draft with a smaller model that shares the target's tokenizer."""

    kind: Literal["draft"] = "draft"
    num_speculative_tokens: DraftLength = 4
    tree: TreeSpec | None = None
    """None: a chain."""


class HeadMethod(Frozen):
    """Draft with a head that reads the target's hidden states: EAGLE-1/2, EAGLE-3 or MTP."""

    kind: Literal["eagle", "eagle3", "mtp"]
    num_speculative_tokens: DraftLength = 4
    tree: TreeSpec | None = None
    """None: a chain."""


class MedusaMethod(Frozen):
    """Draft with Medusa's heads, one for each of the next positions."""

    kind: Literal["medusa"] = "medusa"
    num_speculative_tokens: DraftLength = 4
    tree: StaticTreeSpec | None = None
    """None: a chain."""


class NoMethod(Frozen):
    """Plain decoding."""

    kind: Literal["none"] = "none"
    num_speculative_tokens: Literal[0] = 0


LookupMethod = Annotated[NgramMethod | SuffixMethod, Field(discriminator="kind")]
Method = Annotated[
    NgramMethod | SuffixMethod | DraftMethod | HeadMethod | MedusaMethod | NoMethod,
    Field(discriminator="kind"),
]


class LosslessAcceptance(Frozen):
    """Rejection sampling: the output has exactly the target's distribution."""

    kind: Literal["lossless"] = "lossless"


class TypicalAcceptance(Frozen):
    """LOSSY. Medusa's: keep a token above `min(epsilon, delta * exp(-entropy))`."""

    kind: Literal["typical"] = "typical"
    epsilon: float = Field(default=0.09, gt=0, le=1)
    delta: float = Field(default=0.3, gt=0)


class TopAcceptance(Frozen):
    """LOSSY. Relaxed: keep one of the target's `n` likeliest, at most `delta` below the first."""

    kind: Literal["top"] = "top"
    n: int = Field(default=3, ge=1, le=1024)
    delta: float = Field(default=0.6, ge=0, le=1)


Acceptance = Annotated[
    LosslessAcceptance | TypicalAcceptance | TopAcceptance, Field(discriminator="kind")
]
