"""What a head borrows of its target lies in the bundle once."""

from pathlib import Path

import onnx
import pytest

from tests.head_bundles import MAKERS
from tests.tiny import VOCAB_SIZE

Place = tuple[str, int]
"""File, offset."""


def vocabulary_matrices(target: Path) -> dict[Place, bytes]:
    """All matrices with a row for each token that the graphs of a bundle name, by their place."""
    found = {}
    for graph in target.glob("*.onnx"):
        for tensor in onnx.load(graph, load_external_data=False).graph.initializer:
            if tensor.dims[:1] == [VOCAB_SIZE] and tensor.external_data:
                entries = {entry.key: entry.value for entry in tensor.external_data}
                start, size = int(entries["offset"]), int(entries["length"])
                data = (target / entries["location"]).read_bytes()[start : start + size]
                found[entries["location"], start] = data
    return found


@pytest.mark.parametrize(
    "name",
    ["eagle", "eagle3, ModelOpt, the target's output matrix", "mtp, deepseek_v3", "mtp, mimo"],
)
def test_embedding_and_output_matrix_are_stored_once(name: str, tmp_path: Path) -> None:
    target = MAKERS[name](tmp_path, "hidden", 0.25).path / "target"
    matrices = vocabulary_matrices(target)
    assert len(matrices) == len(set(matrices.values())) == 2
    assert {file for file, _ in matrices} == {"model.weights"}
    matrix_bytes = len(next(iter(matrices.values())))
    assert matrix_bytes == VOCAB_SIZE * 32 * 4
    assert (target / "model.weights").stat().st_size > 2 * matrix_bytes
    assert all(m not in (target / "head.weights").read_bytes() for m in matrices.values())


def test_an_output_matrix_of_its_own_is_stored_beside_the_targets(tmp_path: Path) -> None:
    target = MAKERS["medusa"](tmp_path, "hidden", 0.25).path / "target"
    files = sorted(file for file, _ in vocabulary_matrices(target))
    assert files == ["medusa.weights"] * 3 + ["model.weights"] * 2
