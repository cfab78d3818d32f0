"""Drafting heads at the command line: built, shown, run, and refused where they do not fit."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

from specexport import Engine, EngineOptions, SamplingParams
from specexport.cli import cli
from specexport.errors import BundleError
from specexport.export.build import BuildOptions, build
from specexport.export.methods import MedusaMethod, StaticTreeSpec
from tests import tiny_eagle, tiny_eagle3, tiny_medusa
from tests.cycle import ORDER
from tests.head_bundles import MAKERS, HeadBundle
from tests.heads_tiny import LAYER_CONFIG, Tensors, write_head
from tests.tiny import write_checkpoint

KINDS = {
    "medusa": "medusa",
    "eagle": "eagle",
    "eagle3": "eagle3, SpecForge",
    "mtp": "mtp, deepseek_v3",
}


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory) -> dict[str, HeadBundle]:
    """A bundle of each method, beside its target and its head."""
    return {
        method: MAKERS[name](tmp_path_factory.mktemp(method), "hidden", 0.25)
        for method, name in KINDS.items()
    }


def run(*arguments: str | Path) -> str:
    result = CliRunner().invoke(cli, [str(argument) for argument in arguments])
    assert result.exit_code == 0, result.output
    return result.stdout


def refused(*arguments: str | Path) -> str:
    """The one error."""
    result = CliRunner().invoke(cli, [str(argument) for argument in arguments])
    assert result.exit_code in (1, 2), result.output
    assert result.output.count("Error: ") == 1
    return result.output.partition("Error: ")[2]


def sources(bundle: HeadBundle) -> tuple[str | Path, ...]:
    """The target, and the head where it has a checkpoint of its own."""
    folder = bundle.path.parent
    head = ("--head", folder / "head") if (folder / "head").exists() else ()
    return folder / "target", *head


@pytest.mark.parametrize(
    ("method", "tree", "words"),
    [
        ("medusa", "[[0],[1],[0,0],[0,0,0]]", ("Medusa, FasterDecoding", "the final norm")),
        ("eagle", "dynamic:3,2,5", ("EAGLE-1/2", "the 5 likeliest nodes, up to 3 deep")),
        ("eagle3", "dynamic", ("EAGLE-3, SpecForge", "layers 1, 3 and 4", "90 of the target's")),
        ("mtp", "[[0],[1],[0,0]]", ("MTP, DeepSeek-V3", "2 deep: [0] [1] [0, 0]")),
    ],
)
def test_a_head_is_built_shown_and_run(
    method: str,
    tree: str,
    words: tuple[str, ...],
    heads: dict[str, HeadBundle],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "150")  # no name is folded
    bundle, lossy = tmp_path / "bundle", ("--acceptance", "top:2,0.5")
    options = ("--method", method, "--tree", tree, "--lookup", "suffix", *lossy)
    built = run("build", *sources(heads[method]), "-o", bundle, *options)
    assert f"Head: {words[0]}" in built
    assert "LOSSY: acceptance top" in built
    shown = run("inspect", bundle)
    for word in (*words, "suffix (num_", "LOSSY: top (n 2, delta 0.5)", "all of them used"):
        assert word in " ".join(shown.split()), word
    manifest = json.loads(run("inspect", bundle, "--json"))["manifest"]
    for name in (*manifest["head"]["tensors"], *manifest["files"]):
        assert name in shown
    exact = ("--acceptance", "lossless", "-n", "20", "--json")
    found = json.loads(run("generate", bundle, "to be or not to be, to be", *exact))
    plain = json.loads(
        run("generate", bundle, "to be or not to be, to be", *exact, "--method", "none")
    )
    assert found["token_ids"] == plain["token_ids"]
    assert found["stats"]["drafts"] > plain["stats"]["drafts"] == 0
    own_rule = json.loads(run("generate", bundle, "to be", "-n", "9", "--json"))
    assert own_rule["stats"]["lossless"] is False


def test_the_manifest_of_a_head_is_the_same_each_time(
    heads: dict[str, HeadBundle], tmp_path: Path
) -> None:
    """Tensors are listed in the order of their names."""
    tensors = json.loads(run("inspect", heads["mtp"].path, "--json"))["manifest"]["head"]["tensors"]
    assert list(tensors) == sorted(tensors)


@pytest.mark.parametrize(
    ("method", "options", "message"),
    [
        ("medusa", (), "Method medusa needs its head: give --head PATH."),
        ("eagle3", (), "Method eagle3 needs its head: give --head PATH."),
        ("mtp", ("--head", "{eagle}"), "holds no tensors of an MTP layer"),
        ("ngram", ("--head", "{eagle}"), "--head has no meaning for method ngram"),
        ("eagle", ("--head", "{eagle3}"), "is an EAGLE-3 head"),
        ("eagle3", ("--head", "{eagle}"), "is no EAGLE-3 head"),
        ("medusa", ("--head", "{eagle}"), "holds no Medusa heads"),
        ("eagle", ("--head", "{medusa}"), "vocab_size is missing"),
        ("eagle", ("--head", "nowhere"), "neither an existing path nor a hub id"),
        ("medusa", ("--head", "{medusa}", "-k", "4"), "there are 3 Medusa heads"),
        (
            "medusa",
            ("--head", "{medusa}", "--tree", "[[0],[0,0],[0,0,0],[0,0,0,0]]"),
            "there are 3 Medusa heads",
        ),
        ("medusa", ("--head", "{medusa}", "--tree", "dynamic"), "drafts static trees alone"),
        ("eagle", ("--head", "{eagle}", "--tree", "[[0],[1,0]]"), "needs [1], which is missing"),
        ("eagle", ("--head", "{eagle}", "--min-match", "2"), "no meaning for method eagle"),
    ],
)
def test_a_head_that_does_not_fit_is_refused_and_leaves_nothing_behind(
    method: str,
    options: tuple[str, ...],
    message: str,
    heads: dict[str, HeadBundle],
    tmp_path: Path,
) -> None:
    places = {name: str(bundle.path.parent / "head") for name, bundle in heads.items()}
    filled = [option.format_map(places) if "{" in option else option for option in options]
    target = heads["eagle"].path.parent / "target"
    error = refused("build", target, "-o", tmp_path / "bundle", "--method", method, *filled)
    assert message in error
    assert list(tmp_path.iterdir()) == []


SPECFORGE = tiny_eagle3.CASES["SpecForge"]
WIDE = {**LAYER_CONFIG, "hidden_size": 64, "architectures": ["LlamaForCausalLM"]}


def without(tensors: Tensors, *names: str) -> Tensors:
    return {name: tensor for name, tensor in tensors.items() if name not in names}


@pytest.mark.parametrize(
    ("method", "config", "tensors", "message"),
    [
        (
            "eagle",
            WIDE,
            tiny_eagle.Case().weights(),
            "has hidden_size 64, the target 32",
        ),
        (
            "eagle3",
            SPECFORGE.config,
            {**SPECFORGE.tensors(), "fc.weight": torch.ones(32, 3 * 48)},
            "Is the head of this target?",
        ),
        (
            "medusa",
            {},
            {**tiny_medusa.classic(tiny_medusa.weights()), "0.0.linear.weight": torch.ones(48, 48)},
            "Is the head of this target?",
        ),
        ("eagle3", SPECFORGE.config, without(SPECFORGE.tensors(), "d2t"), "lacks the tensor 'd2t'"),
        (
            "eagle3",
            SPECFORGE.config,
            without(SPECFORGE.tensors(), "lm_head.weight"),
            "has no output matrix",
        ),
    ],
    ids=["EAGLE width", "EAGLE-3 width", "Medusa width", "no d2t", "no lm_head"],
)
def test_a_head_of_another_target_or_an_incomplete_one_is_refused(
    method: str,
    config: dict[str, Any],
    tensors: Tensors,
    message: str,
    heads: dict[str, HeadBundle],
    tmp_path: Path,
) -> None:
    head = write_head(tmp_path / "head", config, tensors)
    target = heads["eagle3"].path.parent / "target"
    options = ("-o", tmp_path / "bundle", "--method", method, "--head", head)
    assert message in refused("build", target, *options)
    assert list(tmp_path.iterdir()) == [head]


@pytest.mark.parametrize("kind", ["safetensors", "bin"])
@pytest.mark.parametrize("share", [0.0, 0.5, 0.99])
def test_a_cut_off_head_is_refused_and_leaves_nothing_behind(
    kind: str, share: float, heads: dict[str, HeadBundle], tmp_path: Path
) -> None:
    head = write_head(tmp_path / "head", SPECFORGE.config, SPECFORGE.tensors(), kind)
    (path,) = (p for p in head.iterdir() if p.suffix != ".json")
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * share)])
    target = heads["eagle3"].path.parent / "target"
    options = ("-o", tmp_path / "bundle", "--method", "eagle3", "--head", head)
    assert "Download it again" in refused("build", target, *options)
    assert list(tmp_path.iterdir()) == [head]


def test_a_head_whose_numbers_are_missing_in_the_middle_of_writing_leaves_nothing_behind(
    heads: dict[str, HeadBundle], tmp_path: Path
) -> None:
    """Integers where weights are expected are found when they are written, after the target."""
    source = heads["medusa"].path.parent
    head = Path(shutil.copytree(source / "head", tmp_path / "head"))
    tensors = load_file(head / "model.safetensors")
    tensors["2.0.linear.weight"] = tensors["2.0.linear.weight"].to(torch.int32)
    save_file(tensors, head / "model.safetensors")
    options = ("-o", tmp_path / "bundle", "--method", "medusa", "--head", head)
    assert "is stored as int32" in refused("build", source / "target", *options)
    assert list(tmp_path.iterdir()) == [head]


@pytest.mark.parametrize(
    ("method", "name"),
    [
        ("medusa", "medusa.onnx"),
        ("medusa", "medusa.weights"),
        ("eagle3", "head.onnx"),
        ("eagle3", "head.weights"),
        ("eagle3", "fuse.onnx"),
        ("eagle3", "fuse.weights"),
        ("eagle3", "token_map.npy"),
    ],
)
def test_a_bundle_whose_head_is_not_whole_is_refused_when_it_is_loaded(
    method: str, name: str, heads: dict[str, HeadBundle], tmp_path: Path
) -> None:
    copy = Path(shutil.copytree(heads[method].path, tmp_path / "copy"))
    path = copy / "target" / name
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    assert f"{path} was changed after the build" in refused("generate", copy, "hi")
    path.unlink()
    assert f"{path} is missing, though manifest.json lists it" in refused("generate", copy, "hi")
    manifest = json.loads((copy / "manifest.json").read_text())
    del manifest["files"][f"target/{name}"]
    (copy / "manifest.json").write_text(json.dumps(manifest))
    assert f"target/{name} is not among its files" in refused("generate", copy, "hi")
    with pytest.raises(BundleError, match="is damaged"):
        Engine(copy)


@pytest.mark.parametrize(
    ("method", "options", "message"),
    [
        ("medusa", ("-k", "4"), "there are 3 Medusa heads"),
        ("medusa", ("--tree", "[[0],[0,0],[0,0,0],[0,0,0,0]]"), "there are 3 Medusa heads"),
        ("medusa", ("--tree", "[[0],[1]]", "-k", "2"), "trees are 1 deep"),
        ("medusa", ("--tree", "dynamic"), "Method medusa drafts no dynamic tree"),
        ("eagle", ("--method", "eagle3"), "has no eagle3 head. Build it with --method eagle3"),
        ("eagle3", ("--method", "draft"), "has no draft model"),
        ("mtp", ("--tree", "dynamic:3,2,5", "-k", "4"), "trees are 3 deep"),
        ("mtp", ("--method", "ngram", "--tree", "dynamic"), "Method ngram drafts no trees"),
    ],
)
def test_what_a_head_cannot_draft_is_refused(
    method: str, options: tuple[str, ...], message: str, heads: dict[str, HeadBundle]
) -> None:
    assert message in refused("generate", heads[method].path, "hi", "-n", "4", *options)


Outputs = Callable[[int], torch.Tensor]


@pytest.mark.parametrize("drafts_zero", [True, False])
def test_padding_of_a_ragged_tree_is_never_a_draft_of_token_0(
    drafts_zero: bool, tmp_path: Path
) -> None:
    """The target says nothing but token 0, the id that padding has."""

    def always_zero(model: Any) -> None:
        with torch.no_grad():
            model.get_output_embeddings().weight.zero_()  # all equal: the first id is chosen

    checkpoint = write_checkpoint(tmp_path / "target", "llama", edit=always_zero)
    medusa = tiny_medusa.weights()
    if drafts_zero:
        medusa = [{**head, "out": torch.zeros_like(head["out"])} for head in medusa]
    head = write_head(tmp_path / "head", {}, tiny_medusa.classic(medusa))
    tree = StaticTreeSpec(choices=((0,), (1,), (2,), (0, 0), (1, 0), (1, 1), (1, 1, 0), (0, 0, 0)))
    build(
        str(checkpoint), tmp_path / "bundle", BuildOptions(MedusaMethod(tree=tree), head=str(head))
    )
    with Engine(tmp_path / "bundle", EngineOptions(max_slots=3)) as engine:
        prompts = (ORDER[:1], ORDER[:9], ORDER[:30])
        streams = [
            engine.submit(p, SamplingParams(max_tokens=9 + i)) for i, p in enumerate(prompts)
        ]
        for i, stream in enumerate(streams):
            assert stream.result().token_ids == (0,) * (9 + i)
        acceptance = engine.stats().acceptance
    assert acceptance.num_drafts > 0
    assert sum(acceptance.accepted) == (sum(acceptance.proposed) if drafts_zero else 0)
