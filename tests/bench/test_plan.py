"""Variants and requests."""

from dataclasses import replace

from specexport.bench.plan import make_jobs, make_variants
from specexport.runtime.options import EngineOptions
from tests.bench.reports import SETTINGS

PROMPTS = [(i,) for i in range(32)]


def test_without_lengths_the_bundles_own_is_fixed() -> None:
    variants = make_variants(replace(SETTINGS, num_threads=2))
    assert [variant.name for variant in variants] == ["off", "fixed", "adaptive"]
    own = EngineOptions(num_threads=2, prefix_cache_mb=0, verify_files=False)
    assert [variant.options for variant in variants] == [
        replace(own, method="none"),
        replace(own, adaptive=False),
        replace(own, adaptive=True),
    ]


def test_each_length_is_a_variant_and_adaptive_goes_up_to_the_longest() -> None:
    variants = make_variants(replace(SETTINGS, draft_lengths=(2, 8), method="suffix"))
    assert [variant.name for variant in variants] == ["off", "K=2", "K=8", "adaptive"]
    lengths = [variant.options.num_speculative_tokens for variant in variants]
    assert lengths == [None, 2, 8, 8]
    assert [variant.options.method for variant in variants] == ["none", *["suffix"] * 3]


def test_requests_take_the_prompts_in_an_order_of_the_seed() -> None:
    jobs = make_jobs(PROMPTS, replace(SETTINGS, num_requests=40))
    taken = [job.prompt_ids for job in jobs]
    assert sorted(taken[:32]) == PROMPTS
    assert taken[:32] != PROMPTS
    assert taken[32:] == taken[:8]
    assert make_jobs(PROMPTS, replace(SETTINGS, num_requests=40)) == jobs
    assert make_jobs(PROMPTS, replace(SETTINGS, num_requests=40, seed=1)) != jobs


def test_requests_have_the_settings_and_seeds_of_their_own() -> None:
    jobs = make_jobs(PROMPTS, replace(SETTINGS, temperature=0.7, seed=5))
    assert [job.params.seed for job in jobs] == [5, 6, 7, 8]
    assert {(job.params.temperature, job.params.max_tokens) for job in jobs} == {(0.7, 7)}
