"""A cache on a GPU does what one in main memory does; the GPU is a stand-in, or a real one."""

import itertools
from collections.abc import Iterator

import numpy as np
import pytest

from specexport.engines.cache import HostCache, KvCache
from specexport.engines.cuda_cache import CudaCache
from specexport.errors import ConfigError
from tests.fake_gpu_cache import install_fake_cuda

SHAPE = 2, 2, 3, 2, 9, 4  # L, kinds, slots, Hkv, S, D


@pytest.fixture(params=["fake", pytest.param("real", marks=pytest.mark.gpu)])
def caches(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[HostCache, CudaCache]]:
    """Two caches with the same entries."""
    if request.param == "fake":
        install_fake_cuda(monkeypatch)
    host, device = HostCache(SHAPE), CudaCache(SHAPE)
    yield host, device
    device.free()
    device.free()  # a second time does nothing


def _fill(*caches: KvCache) -> None:
    numbers = np.random.default_rng(0).normal(size=SHAPE).astype(np.float32)
    for cache in caches:
        for slot in range(SHAPE[2]):
            cache.write(slot, 0, numbers[:, :, slot])


def _contents(cache: KvCache) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    return np.stack([cache.read(slot, 0, SHAPE[4]) for slot in range(SHAPE[2])])


def test_a_new_cache_is_zero(caches: tuple[HostCache, CudaCache]) -> None:
    assert not _contents(caches[1]).any()


def test_slots_are_written_read_and_moved_as_in_main_memory(
    caches: tuple[HostCache, CudaCache],
) -> None:
    host, device = caches
    _fill(host, device)
    np.testing.assert_array_equal(_contents(device), _contents(host))
    part = np.full((2, 2, 2, 3, 4), 7, dtype=np.float32)
    for cache in caches:
        cache.move_slot(2, 0, 5)
        cache.move_slot(1, 1, 4)
        cache.write(1, 4, part)
        cache.write(1, 2, part[:, :, :, :0])
    np.testing.assert_array_equal(_contents(device), _contents(host))
    np.testing.assert_array_equal(device.read(2, 3, 3), host.read(2, 3, 3))


def test_every_path_of_a_tree_is_moved_together_as_in_main_memory(
    caches: tuple[HostCache, CudaCache],
) -> None:
    """All ascending paths among six drafted entries: gaps, neighbours, overlaps, nothing."""
    for size in range(7):
        for entries in itertools.combinations(range(6), size):
            _fill(*caches)
            for cache in caches:
                cache.compact(1, 2, entries)
            host, device = caches
            np.testing.assert_array_equal(_contents(device), _contents(host), str(entries))


def test_addresses_are_those_of_the_tensors(caches: tuple[HostCache, CudaCache]) -> None:
    host, device = caches
    for layer, kind, slot in itertools.product(range(2), range(2), range(3)):
        offset = host.address(layer, kind, slot) - host.address(0, 0, 0)
        assert device.address(layer, kind, slot) - device.address(0, 0, 0) == offset


def test_what_does_not_fit_is_refused_and_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = install_fake_cuda(monkeypatch, memory_bytes=1000)
    with pytest.raises(ConfigError, match="GPU's memory is full"):
        CudaCache(SHAPE)
    assert cuda.used_bytes == 0
    assert not cuda.streams
