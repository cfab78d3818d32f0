"""In which types a graph's matrices are stored: what the user asked for, and what that means."""

from dataclasses import dataclass
from typing import TypeGuard, get_args

from specexport.errors import ConfigError
from specexport.export.manifest import CodeType, FloatType, WeightType


@dataclass(frozen=True, slots=True)
class WantedTypes:
    """What the user asked for; None leaves it to `Precision.of`."""

    body: WeightType | None = None
    lm_head: WeightType | None = None
    embedding: WeightType | None = None

    def __post_init__(self) -> None:
        if self.embedding == "int4":  # runtimes look up no rows of packed halves of bytes
            raise ConfigError(
                "The embedding cannot be stored as int4. Give int8 (--embedding-weights int8), fp8 "
                "or a type of floats."
            )


@dataclass(frozen=True, slots=True)
class Precision:
    """The types of one graph's matrices. Norms, biases, routers and tables are fp32 in any case."""

    body: WeightType
    """Of attention, MLP, experts and the projections of heads."""
    lm_head: WeightType
    embedding: WeightType
    rest: FloatType
    """Of matrices that cannot be stored as codes."""

    @classmethod
    def of(cls, wanted: WantedTypes, own: FloatType) -> "Precision":
        """Whatever is left open stays as it is in the checkpoint, `own`.

        Only the output matrix follows the body; where that is int4, it is int8.
        """
        body = wanted.body or own
        rest = own if has_codes(body) else body
        lm_head = wanted.lm_head or ("int8" if body == "int4" else body)
        return cls(body, lm_head, wanted.embedding or rest, rest)  # type: ignore[arg-type]

    def is_rounded(self, own: FloatType) -> bool:
        """Whether some matrix has fewer bits than in the checkpoint, whose type is `own`."""
        return not {self.body, self.lm_head, self.embedding} <= {"fp32", own}


def has_codes(weight_type: WeightType) -> TypeGuard[CodeType]:
    """Whether it is stored as codes and scales."""
    return weight_type in get_args(CodeType)
