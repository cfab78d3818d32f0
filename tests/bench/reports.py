"""A benchmark of fake engines, in virtual time."""

from specexport.bench.clients import Job
from specexport.bench.load import ClosedLoop, Load
from specexport.bench.plan import Plan, Settings, make_variants
from specexport.bench.report import Environment, Report
from specexport.bench.results import LoadResult
from specexport.bench.run import bench
from specexport.runtime.params import SamplingParams
from tests.bench.fake_engine import FakeEngine, FakeFactory, Pace
from tests.bench.virtual_time import now_s, run_virtually

SETTINGS = Settings(
    num_requests=4,
    max_tokens=7,
    temperature=0.0,
    num_rounds=3,
    seed=0,
    num_threads=0,
    engine="onnxruntime",
    method=None,
    draft_lengths=(),
    prompts=None,
)
ENVIRONMENT = Environment(
    model="Tiny [llama], fp32",
    method="ngram",
    bundle="tiny",
    machine="a machine, 2 threads",
    versions={"specexport": "1.2.3"},
    arguments=("bench", "tiny", "--prompts", "a $file$.txt"),
    time="2025-01-01 12:00 UTC",
)


def make_job(*prompt: int, max_tokens: int = 7, temperature: float = 0.0) -> Job:
    return Job(prompt, SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=1))


JOBS = tuple(make_job(10 * i, 10 * i + 1) for i in range(4))


def make_plan(loads: tuple[Load, ...] = (ClosedLoop(1), ClosedLoop(2))) -> Plan:
    return Plan(make_variants(SETTINGS), loads, JOBS, SETTINGS.num_rounds)


def make_factory() -> FakeFactory:
    """Off: 7 steps; fixed: 1 + 3 of 2 tokens, 4 drafted; adaptive: 1 + 2 of 3, 3 drafted."""
    return FakeFactory(
        off=FakeEngine(),
        fixed=FakeEngine(Pace(chunk_tokens=2, draft_tokens=4), wrong=20),
        adaptive=FakeEngine(Pace(chunk_tokens=3, draft_tokens=3)),
    )


def make_results() -> list[LoadResult]:
    return run_virtually(bench(make_plan(), make_factory(), lambda what, num: None, now_s))


def make_report() -> Report:
    return Report(ENVIRONMENT, SETTINGS, 123.4, tuple(make_results()))
