"""Profiles hold every step that a bundle can call for, and nothing is out of order."""

from pathlib import Path

import pytest
from pydantic import ValidationError

from specexport.errors import ConfigError
from specexport.export.engine_spec import SizeRange
from specexport.export.manifest import FunctionSpec, Manifest, TensorSpec, read_manifest
from specexport.export.methods import DraftMethod, DynamicTreeSpec, StaticTreeSpec, SuffixMethod
from specexport.export.tensorrt.profiles import Limits, make_profiles, max_nodes


@pytest.fixture
def manifest(draft_bundle: Path) -> Manifest:
    return read_manifest(draft_bundle)


def _with(manifest: Manifest, **values: object) -> Manifest:
    return manifest.model_copy(update=values)


def test_drafts_are_as_large_as_the_method_or_the_lookup_makes_them(manifest: Manifest) -> None:
    static = DraftMethod(tree=StaticTreeSpec(choices=((0,), (1,), (0, 0))))
    dynamic = DraftMethod(tree=DynamicTreeSpec(depth=6, top_k=4, num_nodes=12))
    lookup = SuffixMethod(num_speculative_tokens=9)
    assert max_nodes(_with(manifest, method=DraftMethod(num_speculative_tokens=5))) == 5
    assert max_nodes(_with(manifest, method=static)) == 3
    assert max_nodes(_with(manifest, method=dynamic)) == 20  # computed: 4 at each of 5 levels
    assert max_nodes(_with(manifest, method=static, lookup=lookup)) == 9


def test_a_step_verifies_whole_drafts_and_a_prefill_reads_a_chunk_and_a_draft(
    manifest: Manifest,
) -> None:
    limits = Limits(max_slots=2, max_length=128, chunk=32, max_nodes=4)
    step, prefill = make_profiles(manifest.target, limits)
    assert (step.name, prefill.name) == ("step", "prefill")
    assert step.sizes["query"] == SizeRange(min=1, opt=5, max=5)
    assert step.sizes["num_logits"] == SizeRange(min=1, opt=10, max=10)
    assert prefill.sizes["query"].max == 36
    assert prefill.sizes["num_logits"].max == 72
    for profile in (step, prefill):
        assert profile.sizes["batch"].max == 2
        assert profile.sizes["valid_length"].max == limits.cache_length == 256


def test_caches_hold_text_drafts_and_padding_in_whole_steps() -> None:
    lengths = [Limits(2, max_length, 32, 4).cache_length for max_length in (88, 89, 216)]
    assert lengths == [128, 256, 256]  # of 88 + 4 + 36, 89 + 4 + 36 and 216 + 4 + 36


def test_a_chunk_is_no_longer_than_the_text_can_be() -> None:
    assert Limits(max_slots=1, max_length=64, chunk=256, max_nodes=4).max_query == 64


def test_a_graph_without_a_cache_has_the_profiles_of_its_own_dimension() -> None:
    limits = Limits(max_slots=2, max_length=128, chunk=32, max_nodes=4)
    inputs = {"fuse": ("rows", 96), "medusa": ("batch", 32)}
    fuse, medusa = (
        FunctionSpec(
            path=f"target/{name}.onnx",
            weight_type="fp32",
            num_parameters=1,
            inputs=(TensorSpec(name="hidden_states", dtype="float32", shape=shape),),
            outputs=(),
        )
        for name, shape in inputs.items()
    )
    assert [profile.sizes["rows"].max for profile in make_profiles(fuse, limits)] == [5, 36]
    assert [profile.sizes["batch"].max for profile in make_profiles(medusa, limits)] == [2]


def test_the_decide_graph_has_one_profile_of_whole_drafts(manifest: Manifest) -> None:
    assert manifest.decide is not None
    limits = Limits(max_slots=3, max_length=128, chunk=32, max_nodes=4)
    (profile,) = make_profiles(manifest.decide, limits)
    most = {name: size.max for name, size in profile.sizes.items()}
    vocab_size = manifest.target.vocab_size
    assert most == {
        **{"positions": 15, "requests": 3, "places": 5},
        **{"adjusted": 128, "proposals": vocab_size},
    }


def test_a_draft_longer_than_the_text_is_refused(manifest: Manifest) -> None:
    short = manifest.target.model_copy(update={"max_length": 4})
    with pytest.raises(ConfigError, match=r"Drafts have up to 4 tokens, but target/model\.onnx"):
        Limits.of(manifest, short, max_slots=1, chunk=8)


@pytest.mark.parametrize("sizes", [(0, 1, 1), (2, 1, 3), (1, 4, 3)])
def test_a_range_in_disorder_is_refused(sizes: tuple[int, int, int]) -> None:
    least, best, most = sizes
    with pytest.raises(ValidationError, match="1 <= min <= opt <= max"):
        SizeRange(min=least, opt=best, max=most)
