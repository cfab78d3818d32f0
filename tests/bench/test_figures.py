"""The arithmetic of one run and of several."""

import pytest

from specexport.bench.clients import Clients, Delivery, Trace
from specexport.bench.figures import Drafting, Figures, Percentiles, inter_token_s, measure
from specexport.bench.load import ClosedLoop, Run
from specexport.runtime.output import Completion
from specexport.runtime.request import FinishReason
from specexport.runtime.stats import RequestStats
from tests.bench.fake_engine import FakeEngine, Pace
from tests.bench.reports import JOBS
from tests.bench.virtual_time import now_s, run_virtually


def make_trace(arrived_s: float, *deliveries: tuple[float, int]) -> Trace:
    ids = tuple(range(sum(num for _, num in deliveries)))
    completion = Completion("", ids, FinishReason.STOP, RequestStats())
    found = tuple(Delivery(time_s, num) for time_s, num in deliveries)
    return Trace(JOBS[0], arrived_s, found, found[-1].time_s if found else arrived_s, completion)


def test_percentiles_lie_on_straight_lines_between_values() -> None:
    assert Percentiles.of([float(i) for i in range(101)]) == Percentiles(50, 90, 99)
    assert Percentiles.of([0.0, 100.0]) == Percentiles(50, 90, 99)
    assert Percentiles.of([3.0]) == Percentiles(3, 3, 3)
    assert Percentiles.of([]) is None


def test_the_tokens_of_a_chunk_share_the_gap_before_it() -> None:
    trace = make_trace(0.0, (1.0, 2), (1.6, 3), (2.0, 1))
    # The first chunk's tokens came with the first token: no time was between them.
    assert inter_token_s(trace) == pytest.approx([0.2, 0.2, 0.2, 0.4])


def test_only_what_came_inside_the_window_counts() -> None:
    trace = make_trace(10.0, (11.0, 1), (13.0, 2))
    before, after = Delivery(10.0, 5), Delivery(13.5, 7)
    run = Run(10.0, 13.0, (trace,), (before, *trace.deliveries, after), (10.0, 12.0, 13.0, 13.5))
    figures = measure(run)
    assert figures.tokens_per_s == 3 / 3
    assert figures.requests_per_s == pytest.approx(2 / 3)
    assert figures.first_token_s == Percentiles(1, 1, 1)
    assert figures.inter_token_s == Percentiles(1, 1, 1)
    assert figures.latency_s == Percentiles(3, 3, 3)


def test_a_request_without_tokens_has_a_latency_alone() -> None:
    figures = measure(Run(0.0, 1.0, (make_trace(0.0),), (), (1.0,)))
    assert figures.first_token_s is figures.inter_token_s is None
    assert figures.latency_s == Percentiles(0, 0, 0)


@pytest.mark.parametrize("num_clients", [1, 2, 4])
def test_clients_that_do_not_slow_each_other_add_up(num_clients: int) -> None:
    """One client gets 7 tokens in 4 seconds."""
    jobs = JOBS * 10
    run = run_virtually(
        ClosedLoop(num_clients).drive(Clients(FakeEngine(), now_s), jobs, lambda: None)
    )
    figures = measure(run)
    # Of the first and the last request of each client a part lies in the window.
    assert figures.tokens_per_s == pytest.approx(num_clients * 7 / 4, rel=0.05)
    assert figures.requests_per_s == pytest.approx(num_clients / 4, rel=0.1)
    assert figures.first_token_s == Percentiles(1, 1, 1)
    assert figures.inter_token_s == Percentiles(0.5, 0.5, 0.5)


def test_medians_are_taken_of_each_figure() -> None:
    def figures(value: float, times: Percentiles | None) -> Figures:
        return Figures(value, 10 * value, times, times, times)

    rounds = [
        figures(3.0, Percentiles(1, 5, 9)),
        figures(1.0, None),
        figures(2.0, Percentiles(3, 4, 7)),
    ]
    assert Figures.median(rounds) == figures(2.0, Percentiles(2, 4.5, 8))
    assert Figures.median(rounds[1:2]) == rounds[1]


def test_drafts_are_counted_over_requests_and_runs() -> None:
    engine = FakeEngine(Pace(chunk_tokens=3, draft_tokens=4))
    run = run_virtually(ClosedLoop(1).drive(Clients(engine, now_s), JOBS, lambda: None))
    drafting = Drafting.of(run.traces)
    # Each request: the first token, then two steps with 4 drafted tokens of which 2 are kept.
    assert (drafting.num_tokens, drafting.num_steps) == (4 * 7, 4 * 3)
    assert drafting.acceptance.num_drafts == 4 * 2
    assert drafting.acceptance.rate_per_position == [1, 1, 0, 0]
    assert drafting.acceptance.length == 3
    assert drafting.mean_draft_length == 4
    assert drafting.tokens_per_step == pytest.approx(7 / 3)
    both = Drafting.sum([drafting, drafting])
    assert both.acceptance.num_drafts == 16
    assert both.tokens_per_step == drafting.tokens_per_step
    assert Drafting().tokens_per_step == Drafting().mean_draft_length == 0
