"""A manifest that contradicts itself is refused in one sentence, before anything is loaded."""

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from specexport import Engine, EngineOptions
from specexport.errors import BundleError
from specexport.export.manifest import read_manifest
from specexport.export.methods import (
    MedusaMethod,
    NgramMethod,
    SuffixMethod,
    TopAcceptance,
    TypicalAcceptance,
)
from tests.head_bundles import MAKERS

KINDS = {
    "eagle3": "eagle3, SpecForge",
    "eagle": "eagle",
    "medusa": "medusa, reduced vocabulary",
    "mtp": "mtp, deepseek_v3",
}
MISSING = object()


@pytest.fixture(scope="session")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("heads")
    return {
        kind: MAKERS[name](folder / kind, "embedding", 0.5).path for kind, name in KINDS.items()
    }


def edit(bundle: Path, folder: Path, changes: dict[str, Any]) -> Path:
    """A copy of the manifest alone, with values at dotted paths; MISSING takes one out."""
    manifest = json.loads((bundle / "manifest.json").read_text())
    for path, value in changes.items():
        *parents, last = path.split(".")
        found = manifest
        for key in parents:
            found = found[int(key)] if isinstance(found, list) else found[key]
        if value is MISSING:
            del found[last]
        else:
            found[int(last) if isinstance(found, list) else last] = value
    folder.mkdir(exist_ok=True)
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder


@pytest.mark.parametrize("kind", KINDS)
def test_a_manifest_as_built_is_read(kind: str, bundles: dict[str, Path], tmp_path: Path) -> None:
    assert read_manifest(edit(bundles[kind], tmp_path / "copy", {})).method.kind == kind


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("eagle3", {"target.outputs": []}, "at 'target': output 'logits' is missing"),
        ("eagle3", {"target.inputs": []}, r"'target': the inputs past_key_values.0.\* are \[\]"),
        ("eagle3", {"target.vocab_size": 100}, r"'logits' has shape .*272.*call for .*100"),
        ("eagle3", {"target.num_kv_heads": 9}, r"input 'past_key_values\.0\.key' has shape"),
        ("eagle3", {"target.hidden_size": 48}, "3 hidden states of 48 numbers are 144"),
        ("eagle3", {"target.hidden_size": 40}, "is 96 wide, no multiple of hidden_size 40"),
        ("eagle3", {"head.step.vocab_size": 500}, r"'head\.step': output 'logits' has shape"),
        ("eagle3", {"head.step.num_layers": 3}, r"'past_key_values\.1\.key' is missing"),
        ("eagle3", {"head.step.num_layers": 2**31 - 1}, r"'past_key_values\.1\.key' is missing"),
        ("eagle3", {"head.step.head_dim": 99}, r"'past_key_values\.0\.key' has shape"),
        ("eagle3", {"head.step.hidden_size": 5}, "input 'hidden_states' has shape"),
        ("eagle3", {"head.step.outputs": []}, "output 'logits' is missing"),
        ("eagle3", {"head.step.inputs.0.name": "ids"}, "input 'input_ids' is missing"),
        ("eagle3", {"head.step.inputs.1.name": "input_ids"}, "an input stands twice"),
        ("eagle3", {"head.step.outputs.1.name": "x"}, "output 'recycled_states' is missing"),
        ("eagle3", {"head.step": None}, "'head': a head has either"),
        ("eagle3", {"head.taps": []}, "taps is empty"),
        ("eagle3", {"head.taps": [1, 3, 8]}, "head.taps holds 8; the target has layers 0 to 7"),
        ("eagle3", {"head.taps": [1, 3]}, "2 hidden states of 32 numbers are 64; .* has 96"),
        ("eagle3", {"head.fuse": None}, "are 96; .* has 96, and the head reads 32"),
        ("eagle3", {"head.fuse.outputs": []}, "fuse has 0 outputs"),
        ("eagle3", {"head.fuse.outputs.0.shape": ["rows", 16]}, "fuse gives 16 .* reads 32"),
        ("eagle3", {"head.fuse.inputs.0.shape": ["rows", 64]}, "the head reads 64"),
        ("eagle3", {"head.token_map": None}, "predicts 90 tokens, the target 272, and head.token"),
        ("eagle3", {"method.kind": "eagle"}, "method is eagle, but the head is 'EAGLE-3, Spec"),
        ("eagle3", {"method.kind": "mtp"}, "method is mtp, but the head is 'EAGLE-3"),
        ("eagle3", {"method.kind": "medusa"}, "damaged: method medusa lacks its graph"),
        ("eagle3", {"eos_token_ids": [257, 272]}, "eos_token_ids holds 272; .* ids 0 to 271"),
        ("eagle3", {"eos_token_ids": [-1]}, "eos_token_ids holds -1"),
        ("eagle3", {"decide.inputs": []}, "decide reads logits of 0 tokens, the target gives 272"),
        ("eagle", {"target.outputs.1.name": "x"}, "output 'x' is none that its sizes call for"),
        ("eagle", {"head.taps": [-2]}, "head.taps holds -2"),
        ("eagle", {"method.kind": "eagle3"}, "method is eagle3, but the head is 'EAGLE-1/2'"),
        ("eagle", {"method.num_speculative_tokens": 257}, "less than or equal to 256"),
        ("mtp", {"method.kind": "eagle"}, "method is eagle, but the head is 'MTP"),
        ("mtp", {"head.step.inputs.6.name": "past_key_values.0.value"}, r"are \['value'\]"),
        ("medusa", {"head.medusa.outputs": []}, r"outputs of shapes \[\]; expected one of"),
        ("medusa", {"head.medusa.outputs.0.shape": ["batch", "x", 90]}, "'x', 90.*expected one"),
        (
            "medusa",
            {"head.medusa.outputs.0.shape": ["batch", 3]},
            r"'logits' has shape \['batch', 3\]",
        ),
        ("medusa", {"head.medusa.outputs.0.shape": ["batch", 3, 272, 1]}, "has shape"),
        ("medusa", {"head.medusa.inputs.0.shape": ["batch", 16]}, "the head reads 16"),
        ("medusa", {"head.medusa.inputs.0.name": "x"}, "input 'hidden_states' is missing"),
        ("medusa", {"head.token_map": None}, "predicts 90 tokens, the target 272"),
        ("medusa", {"target.outputs.1": {"name": "y", "dtype": "", "shape": []}}, "output 'y'"),
        ("medusa", {"acceptance": {"kind": "typical", "delta": 1e999}}, "finite number"),
    ],
)
def test_a_number_that_contradicts_another_is_named(
    kind: str, changes: dict[str, Any], message: str, bundles: dict[str, Path], tmp_path: Path
) -> None:
    folder = edit(bundles[kind], tmp_path / "copy", changes)
    with pytest.raises(BundleError, match=message) as error:
        read_manifest(folder)
    assert "\n" not in str(error.value)
    assert str(error.value).endswith("Build the bundle again.")


def test_a_head_is_no_target(bundles: dict[str, Path], tmp_path: Path) -> None:
    manifest = json.loads((bundles["eagle"] / "manifest.json").read_text())
    folder = edit(bundles["eagle"], tmp_path / "copy", {"target": manifest["head"]["step"]})
    with pytest.raises(BundleError, match="target has an input 'hidden_states', so it is a head"):
        read_manifest(folder)


IDS = np.arange(90)


@pytest.mark.parametrize("kind", ["eagle3", "medusa"])
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"junk", "is no NumPy file"),
        (b"", "is no NumPy file"),
        (np.array([{}], dtype=object), "is no NumPy file"),
        (IDS.astype(np.float64), r"holds float64 of shape \[90\]; expected token ids"),
        (IDS.reshape(2, 45), r"holds int64 of shape \[2, 45\]; expected token ids"),
        (IDS[:5], "the head's 90 ids to as many different ones .* 0 to 271; it holds 5"),
        (IDS + 183, "it holds 90, from 183 to 272"),
        (IDS - 1, "it holds 90, from -1 to 88"),
        (IDS // 2, "it holds 90, from 0 to 44"),
        (np.full(90, 2**64 - 1, np.uint64), "it holds 90, from -1 to -1"),
    ],
)
def test_a_token_map_that_is_none_is_refused(
    kind: str, content: Any, message: str, bundles: dict[str, Path], tmp_path: Path
) -> None:
    bundle = Path(shutil.copytree(bundles[kind], tmp_path / "bundle"))
    file = bundle / "target/token_map.npy"
    if isinstance(content, bytes):
        file.write_bytes(content)
    else:
        np.save(file, content, allow_pickle=True)
    data = file.read_bytes()
    entry = {"size_bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    manifest = json.loads((bundle / "manifest.json").read_text())
    manifest["files"]["target/token_map.npy"] = entry
    (bundle / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(BundleError, match=message):
        Engine(bundle, EngineOptions(num_threads=1))


@pytest.mark.parametrize(
    ("model", "values"),
    [
        (TypicalAcceptance, {"delta": float("inf")}),
        (TypicalAcceptance, {"epsilon": float("nan")}),
        (TopAcceptance, {"n": 10**20}),
        (NgramMethod, {"num_speculative_tokens": 257}),
        (NgramMethod, {"max_ngram": 33}),
        (SuffixMethod, {"min_match": 1025}),
        (SuffixMethod, {"factor": 10**20}),
        (SuffixMethod, {"store_tokens": 10**9}),
        (MedusaMethod, {"num_speculative_tokens": 257}),
    ],
)
def test_no_manifest_holds_a_number_that_cannot_be_run(model: Any, values: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        model(**values)
