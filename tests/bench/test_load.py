"""How requests arrive."""

import asyncio
from collections.abc import Sequence
from itertools import pairwise

import pytest

from specexport.bench.clients import Clients, Job
from specexport.bench.load import ClosedLoop, Load, PoissonArrivals, Run
from tests.bench.fake_engine import FakeEngine, Pace
from tests.bench.reports import JOBS
from tests.bench.virtual_time import now_s, run_virtually


def drive(load: Load, engine: FakeEngine, jobs: Sequence[Job] = JOBS) -> tuple[Run, int]:
    """The run and how often it told of an end; each of `JOBS` takes 4 seconds."""
    ended = []
    run = run_virtually(load.drive(Clients(engine, now_s), jobs, lambda: ended.append(now_s())))
    return run, len(ended)


def test_a_closed_loop_counts_while_it_serves_the_jobs() -> None:
    run, num_ended = drive(ClosedLoop(1), FakeEngine())
    assert (run.start_s, run.end_s) == (4, 4 + 4 * 4)  # after one request to warm up
    assert [trace.arrived_s for trace in run.traces] == [4, 8, 12, 16]
    assert [trace.job for trace in run.traces] == list(JOBS)
    assert num_ended == 4


def test_clients_do_not_go_in_step() -> None:
    run, _ = drive(ClosedLoop(2), FakeEngine())
    # The warm-up requests have 4 and 7 tokens.
    assert [trace.arrived_s for trace in run.traces] == [2.5, 4, 6.5, 8]
    assert (run.start_s, run.end_s) == (2.5, 12)


def test_the_load_of_a_closed_loop_stays_the_same_throughout() -> None:
    run, num_ended = drive(ClosedLoop(2), FakeEngine(), JOBS[:3])
    assert num_ended == len(run.traces) == 3
    assert [trace.arrived_s for trace in run.traces] == [2.5, 4, 6.5]
    # The first client serves from 2.5 to 6.5 and to 10.5, the second warms up until 4, serves until
    # 8, and then keeps the load up.
    assert run.end_s == 10.5
    times_s = [delivery.time_s for delivery in run.deliveries if 8 < delivery.time_s <= 10.5]
    assert times_s.count(9) == 2
    assert times_s.count(10.5) == 2


def test_more_clients_than_requests_are_all_busy() -> None:
    engine = FakeEngine()
    run, _ = drive(ClosedLoop(3), engine, JOBS[:1])
    assert len(run.traces) == 1
    assert engine.submitted == [JOBS[0].prompt_ids] * (3 + 1 + 2)


def test_a_failed_request_ends_the_run_and_all_clients() -> None:
    engine = FakeEngine(bad=20)

    async def run() -> int:
        with pytest.raises(RuntimeError, match="the request failed"):
            await ClosedLoop(2).drive(Clients(engine, now_s), JOBS, lambda: None)
        return len(asyncio.all_tasks())

    assert run_virtually(run()) == 1
    assert engine.num_running == 0


def test_arrivals_are_poisson_and_repeatable() -> None:
    load = PoissonArrivals(4.0, 8, seed=3)
    offsets_s = load.offsets_s(4001)
    assert offsets_s == load.offsets_s(4001)
    assert offsets_s != PoissonArrivals(4.0, 8, seed=4).offsets_s(4001)
    assert offsets_s[0] == 0
    gaps_s = [b - a for a, b in pairwise(offsets_s)]
    assert min(gaps_s) > 0
    # Mean and standard deviation of exponential gaps are the same; both within 5 standard errors
    # (of the deviation it is √2 times as large): a false alarm once in a million seeds.
    mean = sum(gaps_s) / 4000
    deviation = (sum((gap - mean) ** 2 for gap in gaps_s) / 4000) ** 0.5
    assert mean == pytest.approx(0.25, rel=5 / 4000**0.5)
    assert deviation == pytest.approx(0.25, rel=5 * 2**0.5 / 4000**0.5)


def test_requests_arrive_whether_or_not_earlier_ones_have_ended() -> None:
    load = PoissonArrivals(2.0, 3, seed=0)
    engine = FakeEngine()
    run, num_ended = drive(load, engine)
    assert run.start_s == 4  # the warm-up, as many requests as there are slots
    arrivals = [4 + offset_s for offset_s in load.offsets_s(4)]
    assert [trace.arrived_s for trace in run.traces] == pytest.approx(arrivals)
    assert [trace.finished_s for trace in run.traces] == pytest.approx([s + 4 for s in arrivals])
    assert run.end_s == pytest.approx(arrivals[-1] + 4)
    assert (len(engine.submitted), num_ended) == (3 + 4, 4)


def test_a_request_counts_from_when_it_should_have_been_sent() -> None:
    run, _ = drive(PoissonArrivals(2.0, 1, seed=0), FakeEngine(Pace(submit_s=2)))
    for trace in run.traces:
        assert trace.deliveries[0].time_s - trace.arrived_s == pytest.approx(3)


def test_a_failed_arrival_ends_the_run() -> None:
    engine = FakeEngine(bad=20)
    with pytest.raises(RuntimeError, match="the request failed"):
        drive(PoissonArrivals(2.0, 1, seed=0), engine)
    assert engine.num_running == 0
