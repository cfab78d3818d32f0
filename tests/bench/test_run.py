"""The order of a whole benchmark."""

import pytest

from specexport.bench.load import ClosedLoop, PoissonArrivals
from specexport.bench.run import bench
from specexport.errors import ConfigError
from specexport.runtime.options import EngineOptions
from tests.bench.fake_engine import FakeEngine, FakeFactory, kind_of
from tests.bench.reports import JOBS, make_factory, make_plan, make_results
from tests.bench.virtual_time import now_s, run_virtually


def test_variants_take_turns_there_and_back_after_all_were_loaded_once() -> None:
    factory = make_factory()
    plan = make_plan((ClosedLoop(2),))
    run_virtually(bench(plan, factory, lambda what, num: None, now_s))
    forth = ["off", "fixed", "adaptive"]
    order = [kind_of(engine.options) for engine in factory.opened]
    assert order == forth + forth + forth[::-1] + forth
    assert all(engine.is_closed for engine in factory.opened)
    assert [bool(engine.submitted) for engine in factory.opened] == [False] * 3 + [True] * 9
    assert [engine.options.verify_files for engine in factory.opened] == [True] + [False] * 11


def test_every_variant_gets_the_same_requests() -> None:
    factory = make_factory()
    run_virtually(bench(make_plan((ClosedLoop(1),)), factory, lambda what, num: None, now_s))
    measured = [engine.submitted for engine in factory.opened[3:]]
    assert all(submitted == measured[0] for submitted in measured)
    assert measured[0][1:] == [job.prompt_ids for job in JOBS]


def test_engines_have_a_slot_for_each_client_and_room_for_all_that_wait() -> None:
    factory = make_factory()
    loads = (ClosedLoop(3), PoissonArrivals(1.0, 5, seed=0))
    run_virtually(bench(make_plan(loads), factory, lambda what, num: None, now_s))
    slots = [engine.options.max_slots for engine in factory.opened]
    assert slots == [5] * 3 + [3] * 9 + [5] * 9
    assert all(engine.options.max_waiting >= len(JOBS) for engine in factory.opened)


def test_drafting_shows_in_the_figures_and_a_wrong_output_is_found() -> None:
    off, fixed, adaptive = make_results()[0].points
    # 1 second and 6, 3 or 2 steps of half a second
    assert fixed.speedup == pytest.approx(4 / 2.5)
    assert adaptive.speedup == pytest.approx(4 / 2)
    assert (off.num_different, fixed.num_different, adaptive.num_different) == (0, 1, 0)
    assert fixed.num_compared == 4


def test_progress_counts_every_measured_request() -> None:
    told: list[tuple[str, int]] = []
    plan = make_plan()
    run_virtually(bench(plan, make_factory(), lambda what, num: told.append((what, num)), now_s))
    assert sum(num for _, num in told) == plan.num_requests == 3 * 2 * 4 * 3
    assert told[0] == ("loading, off", 0)
    assert ("2 requests at once, round 3 of 3, adaptive", 1) in told


def test_a_variant_that_cannot_be_loaded_stops_it_before_anything_is_measured() -> None:
    opened: list[FakeEngine] = []

    def open_engine(options: EngineOptions) -> FakeEngine:
        if options.adaptive:
            raise ConfigError("no such tree")
        opened.append(FakeEngine())
        return opened[-1]

    with pytest.raises(ConfigError, match="no such tree"):
        run_virtually(bench(make_plan(), open_engine, lambda what, num: None, now_s))
    assert [engine.submitted for engine in opened] == [[], []]
    assert all(engine.is_closed for engine in opened)


def test_a_failed_request_ends_it_and_closes_the_engine() -> None:
    factory = FakeFactory(off=FakeEngine(), fixed=FakeEngine(bad=20), adaptive=FakeEngine())
    with pytest.raises(RuntimeError, match="the request failed"):
        run_virtually(bench(make_plan(), factory, lambda what, num: None, now_s))
    assert all(engine.is_closed for engine in factory.opened)
    assert kind_of(factory.opened[-1].options) == "fixed"
