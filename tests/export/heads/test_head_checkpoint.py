"""What head repositories ship: safetensors and pickles, whole or in shards."""

import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from specexport.errors import CheckpointError
from specexport.export.heads.head_checkpoint import open_head
from tests.heads_tiny import Random, Tensors, write_head


def tensors() -> Tensors:
    random = Random()
    return {
        "fc.weight": random.matrix(4, 8),
        "half": random.matrix(3, 5).half(),
        "brain": random.matrix(2, 2).bfloat16(),
        "d2t": torch.tensor([3, 1, 4]),
        "t2d": torch.tensor([True, False]),
    }


@pytest.mark.parametrize("kind", ["safetensors", "bin", "safetensors-shards", "bin-shards"])
def test_every_kind_of_file_gives_the_same_tensors(kind: str, tmp_path: Path) -> None:
    head = open_head(write_head(tmp_path / "head", {"hidden_size": 4}, tensors(), kind))
    assert head.config == {"hidden_size": 4}
    assert sorted(head.names()) == sorted(tensors())
    dtypes = {"fc.weight": "fp32", "half": "fp16", "brain": "bf16", "d2t": "int64", "t2d": "bool"}
    for name, expected in tensors().items():
        assert head.shape(name) == tuple(expected.shape)
        assert head.dtype(name) == dtypes[name]
        if expected.is_floating_point():
            np.testing.assert_array_equal(head.tensor(name).astype(np.float32), expected.float())
        else:
            assert head.indices(name).tolist() == expected.long().tolist()


def test_a_pickle_of_the_old_format_is_read(tmp_path: Path) -> None:
    path = tmp_path / "medusa_lm_head.pt"
    torch.save(tensors(), path, _use_new_zipfile_serialization=False)
    np.testing.assert_array_equal(open_head(tmp_path).tensor("fc.weight"), tensors()["fc.weight"])


def test_a_file_is_opened_with_the_config_beside_it(tmp_path: Path) -> None:
    folder = write_head(tmp_path / "head", {"hidden_size": 4}, tensors(), "bin")
    head = open_head(folder / "pytorch_model.bin")
    assert head.config == {"hidden_size": 4}
    assert head.shape("fc.weight") == (4, 8)


def test_safetensors_win_over_pickles_and_optimizer_states_are_left_alone(tmp_path: Path) -> None:
    folder = write_head(tmp_path / "head", {}, {"new": torch.ones(1)})
    torch.save({"old": torch.ones(1)}, folder / "pytorch_model.bin")
    torch.save({"lr": 0.1}, folder / "optimizer.bin")
    assert list(open_head(folder).names()) == ["new"]


class Payload:
    """Creates a file when it is unpickled by someone who runs what a pickle says."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("plain", [True, False])
def test_a_pickle_that_runs_code_is_refused_and_not_run(plain: bool, tmp_path: Path) -> None:
    payload = {"fc.weight": Payload(tmp_path / "ran")}
    if plain:
        (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps(payload, protocol=2))
    else:
        torch.save(payload, tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin is damaged, or a p") as error:
        open_head(tmp_path)
    assert "(posix.mkdir), which is never done here. Give a file of tensors" in str(error.value)
    assert "weights_only" not in str(error.value)
    assert not (tmp_path / "ran").exists()


def test_a_pickled_module_is_refused_without_torchs_advice(tmp_path: Path) -> None:
    torch.save(torch.nn.Linear(2, 2), tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"\(torch\.nn\.modules\.linear\.Linear\)") as error:
        open_head(tmp_path)
    assert "weights_only" not in str(error.value)
    assert "\x1b" not in str(error.value)


@pytest.mark.parametrize("content", [b"", b"hello" * 100, b"<!DOCTYPE html>", bytes(100)])
def test_what_is_no_pytorch_file_is_called_that(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"is no whole PyTorch file of tensors\. Download"):
        open_head(tmp_path)


def test_parameters_and_views_of_other_tensors_are_read_as_their_numbers(tmp_path: Path) -> None:
    numbers = Random().matrix(4, 4)
    saved = {
        "parameter": torch.nn.Parameter(numbers),
        "transposed": numbers.T.clone().T,
        "negated": torch._neg_view(-numbers),
        "row": numbers[:1],
    }
    torch.save(saved, tmp_path / "pytorch_model.bin")
    head = open_head(tmp_path)
    for name in saved:
        expected = numbers[:1] if name == "row" else numbers
        np.testing.assert_array_equal(head.tensor(name), expected.numpy())


@pytest.mark.filterwarnings("ignore:.*:UserWarning")
@pytest.mark.parametrize(
    ("tensor", "what"),
    [
        (lambda: torch.eye(4).to_sparse(), "a sparse tensor"),
        (lambda: torch.eye(4).to_sparse_csr(), "a sparse tensor"),
        (lambda: torch.ones(2, 2, device="meta"), "a tensor without numbers"),
        (
            lambda: torch.quantize_per_tensor(torch.ones(2, 2), 0.1, 0, torch.qint8),
            "a quantized tensor",
        ),
        (lambda: torch.zeros(1, 1).expand(1 << 20, 1 << 20), "a view that repeats its numbers"),
    ],
)
def test_a_tensor_of_another_kind_is_refused_by_name(
    tensor: Callable[[], torch.Tensor], what: str, tmp_path: Path
) -> None:
    torch.save({"fc.weight": tensor()}, tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=rf"fc\.weight is {what}"):
        open_head(tmp_path)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_numbers_that_are_none_are_refused_by_name(dtype: torch.dtype, tmp_path: Path) -> None:
    matrix = Random().matrix(400, 300).to(dtype)  # of more than one block
    matrix[399, 299] = torch.nan
    head = open_head(write_head(tmp_path / "head", {}, {"fc.weight": matrix}))
    with pytest.raises(CheckpointError, match=r"head: fc\.weight holds NaN or infinite numbers"):
        head.tensor("fc.weight")


@pytest.mark.parametrize("kind", ["safetensors", "bin"])
@pytest.mark.parametrize("share", [0.0, 0.02, 0.6, 0.99])
def test_a_cut_off_file_is_refused(kind: str, share: float, tmp_path: Path) -> None:
    folder = write_head(tmp_path / "head", {}, tensors(), kind)
    path = next(path for path in folder.iterdir() if path.name != "config.json")
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * share)])
    with pytest.raises(CheckpointError, match=r"no whole|is damaged"):
        open_head(folder)


def test_a_missing_shard_is_refused(tmp_path: Path) -> None:
    folder = write_head(tmp_path / "head", {}, tensors(), "bin-shards")
    (folder / "pytorch_model-00002-of-00002.bin").unlink()
    with pytest.raises(CheckpointError, match=r"00002-of-00002\.bin is missing"):
        open_head(folder)


def test_an_index_that_leads_out_of_the_directory_is_refused(tmp_path: Path) -> None:
    index = {"weight_map": {"fc.weight": "../other.bin"}}
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="must map tensors to file names"):
        open_head(tmp_path)


def test_a_directory_without_weights_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"holds no weights of a head.*medusa_lm_head\.pt"):
        open_head(tmp_path)


def test_a_training_state_is_refused(tmp_path: Path) -> None:
    torch.save({"model": {"fc.weight": torch.ones(1)}, "step": 3}, tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="must hold tensors by name and nothing else"):
        open_head(tmp_path)


def test_numbers_of_the_wrong_kind_are_refused(tmp_path: Path) -> None:
    packed = {"fc.weight": torch.ones(2, 2, dtype=torch.uint8), "d2t": torch.ones(3)}
    head = open_head(write_head(tmp_path / "head", {}, packed))
    with pytest.raises(CheckpointError, match=r"fc\.weight is stored as uint8.*unquantized"):
        head.tensor("fc.weight")
    with pytest.raises(CheckpointError, match=r"d2t is fp32 of shape \[3\]; expected integers"):
        head.indices("d2t")
    with pytest.raises(CheckpointError, match="holds no tensor 'norm'"):
        head.shape("norm")


def test_what_is_neither_a_path_nor_a_hub_id_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="neither an existing path nor a hub id"):
        open_head(tmp_path / "nowhere")


@pytest.mark.parametrize("kind", ["safetensors", "bin"])
def test_pickles_are_downloaded_only_where_there_are_no_safetensors(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub

    folder, asked = write_head(tmp_path / "head", {}, tensors(), kind), []

    def snapshot(repo_id: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        asked.append("*.bin" in allow_patterns)
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    assert sorted(open_head("org/head").names()) == sorted(tensors())
    assert asked == ([False] if kind == "safetensors" else [False, True])
