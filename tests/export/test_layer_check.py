"""Numbers of layers and experts far above a file's: refused at once, whatever they are.

A build that went by the config would take hours and all memory; these tests would not end.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specexport.errors import CheckpointError
from specexport.export.build import BuildOptions, build
from specexport.export.checkpoint import open_checkpoint
from specexport.export.families import read_config
from specexport.export.heads.mtp import plan_mtp
from specexport.export.methods import NoMethod
from tests.tiny import edit_config, write_checkpoint
from tests.tiny_mtp import write_mtp_checkpoint

MANY = 2_000_000_000


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("llama", {"num_hidden_layers": 9_999}, r"lacks 'model\.layers\.2\..*calls for \(9999 l"),
        ("llama", {"num_hidden_layers": MANY}, f"num_hidden_layers is {MANY}; .* 10000"),
        ("mistral", {"num_hidden_layers": MANY, "sliding_window": 8}, "num_hidden_layers is"),
        (
            "qwen3_moe",
            {"num_local_experts": MANY},
            r"lacks 'model\.layers\.0\.mlp\.experts\.8\..*2 layers",
        ),
        ("ernie4_5_moe", {"num_hidden_layers": MANY}, "num_hidden_layers is"),
        (
            "ernie4_5_moe",
            {"moe_num_experts": MANY},
            r"lacks 'model\.layers\.1\.mlp\.experts\.8\.gate_proj.*3 layers and 2000000000 experts",
        ),
        ("glm4_moe", {"n_routed_experts": MANY}, r"lacks 'model\.layers\.1\.mlp\.experts\.8\."),
        ("deepseek_v3", {"first_k_dense_replace": MANY}, "first_k_dense_replace is"),
    ],
)
def test_layers_and_experts_that_the_file_lacks_are_refused_before_they_are_built(
    family: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    checkpoint = write_checkpoint(tmp_path / "checkpoint", family)
    edit_config(checkpoint, **changes)
    with pytest.raises(CheckpointError, match=message):
        build(str(checkpoint), tmp_path / "bundle", BuildOptions(method=NoMethod()))


def test_experts_of_an_mtp_layer_are_looked_for_too(tmp_path: Path) -> None:
    write_mtp_checkpoint(tmp_path, "glm4_moe")
    checkpoint = open_checkpoint(tmp_path)
    config = read_config(checkpoint.config)
    assert config.moe is not None
    wrong = replace(config, moe=replace(config.moe, num_experts=MANY))
    with pytest.raises(CheckpointError, match=r"lacks 'model\.layers\.2\.mlp\.experts\.8\."):
        plan_mtp(checkpoint, wrong)
