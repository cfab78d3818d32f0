"""What the steps of a loaded graph cost: measured on fake engines."""

from dataclasses import dataclass, field

import pytest

from specexport.engines.step import Profile, StepInput, StepOutput
from specexport.runtime import measuring
from specexport.runtime.adaptive import AdaptiveLength, DraftShape
from specexport.runtime.lengths import Outcome, RowState
from specexport.runtime.measuring import measure_costs
from tests.hash_engine import HashEngine


@dataclass
class Clock:
    now_s: float = 0.0

    def perf_counter(self) -> float:
        return self.now_s


@dataclass
class Timed(HashEngine):
    """A step takes `first_s`, and `each_s` more for every token after the first."""

    clock: Clock = field(default_factory=Clock)
    first_s: float = 0.0
    each_s: float = 0.0

    def run(self, step: StepInput) -> StepOutput:
        self.clock.now_s += self.first_s + self.each_s * (step.input_ids.size - 1)
        return super().run(step)


def test_a_slow_model_is_still_known_to_take_several_tokens_for_the_price_of_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, profile = Clock(), Profile(max_length=100, max_query=64)
    monkeypatch.setattr(measuring, "time", clock)
    engine = Timed(profile=profile, clock=clock, first_s=3.0, each_s=0.01)
    table = measure_costs(engine)
    assert len(table.num_tokens) == 4
    assert table.step_s(1, 5, 0) == pytest.approx(3.04)
    lengths = AdaptiveLength(table, None, [DraftShape.chain(n) for n in range(1, 9)])
    for _ in range(20):
        lengths.observe(0, Outcome(8, 4))
    (size,) = lengths.choose([RowState(0, 50, 1, True, 8)])
    assert size.depth >= 4


@pytest.mark.parametrize(("max_length", "max_query"), [(2, 1), (2, 2), (4, 5), (16, 1), (17, 128)])
def test_the_smallest_caches_are_measured_too(max_length: int, max_query: int) -> None:
    engine = HashEngine(profile=Profile(max_length=max_length, max_query=max_query))
    table = measure_costs(engine)
    assert table.num_tokens[-1] <= max_query
