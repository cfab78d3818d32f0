"""What `build` refuses, and that it writes all or nothing."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer

from specexport.errors import ConfigError, SpecExportError
from specexport.export.build import BuildOptions, build
from specexport.export.manifest import read_manifest, verify_files
from specexport.export.methods import DraftMethod
from tests.tiny import write_checkpoint, write_tokenizer


@pytest.fixture
def checkpoint(tiny_checkpoint: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_checkpoint, tmp_path / "checkpoint"))


def edit_config(checkpoint: Path, **changes: Any) -> None:
    path = checkpoint / "config.json"
    config = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({k: v for k, v in config.items() if v != "remove"}))


def edit_tensors(checkpoint: Path, **changes: Any) -> None:
    path = checkpoint / "model.safetensors"
    tensors = {**load_file(path), **changes}
    save_file({k: v for k, v in tensors.items() if v is not None}, path)


def refuse(checkpoint: Path | str, tmp_path: Path, message: str, options: Any = None) -> None:
    """`build` raises an error of ours, and leaves nothing behind."""
    before = sorted(tmp_path.iterdir())
    with pytest.raises(SpecExportError, match=message):
        build(str(checkpoint), tmp_path / "bundle", options or BuildOptions())
    assert sorted(tmp_path.iterdir()) == before


def test_a_bundle_holds_what_its_manifest_lists_and_nothing_else(tiny_bundle: Path) -> None:
    manifest = read_manifest(tiny_bundle)
    verify_files(tiny_bundle, manifest)
    found = {str(p.relative_to(tiny_bundle)) for p in tiny_bundle.rglob("*") if p.is_file()}
    found.discard("tuning.json")  # where an adaptive engine has loaded it since
    assert found == {*manifest.files, "manifest.json"}
    assert manifest.eos_token_ids == (257,)
    assert {"torch", "onnx", "specexport"} <= set(manifest.provenance.versions)


def test_eos_ids_come_from_generation_config_first(checkpoint: Path, tmp_path: Path) -> None:
    (checkpoint / "generation_config.json").write_text('{"eos_token_id": [3, 5]}')
    assert build(str(checkpoint), tmp_path / "bundle").eos_token_ids == (3, 5)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_a_missing_file_is_refused(name: str, checkpoint: Path, tmp_path: Path) -> None:
    (checkpoint / name).unlink()
    refuse(checkpoint, tmp_path, r"no \.safetensors file|config\.json is missing")


def test_a_missing_shard_is_refused(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "sharded", "llama", max_shard_size="40KB")
    next(iter(sorted(checkpoint.glob("*.safetensors")))).unlink()
    refuse(checkpoint, tmp_path, r"\.safetensors is missing")


@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 0.99])
def test_a_cut_off_file_is_refused(share: float, checkpoint: Path, tmp_path: Path) -> None:
    path = checkpoint / "model.safetensors"
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * share)])
    refuse(checkpoint, tmp_path, "no whole safetensors file")


def test_pickled_weights_are_refused_with_the_remedy(checkpoint: Path, tmp_path: Path) -> None:
    (checkpoint / "model.safetensors").rename(checkpoint / "pytorch_model.bin")
    refuse(checkpoint, tmp_path, r"pytorch_model\.bin: convert it")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"architectures": ["GPT2LMHeadModel"]},
            "GPT2LMHeadModel. Supported: .*LlamaForCausalLM, ",
        ),
        ({"architectures": None, "model_type": "bert"}, "model_type 'bert'"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"hidden_size": "remove"}, "hidden_size is missing"),
        ({"num_key_value_heads": 3}, "must be a multiple"),
        ({"intermediate_size": 64}, r"has shape \[48, 32\]; config.json calls for \[64, 32\]"),
        ({"num_hidden_layers": 3}, r"lacks 'model\.layers\.2\..*calls for \(3 layers\)"),
        ({"num_hidden_layers": 1_000_000_000}, "num_hidden_layers is 1000000000; .* 10000"),
        ({"num_hidden_layers": 10_000}, r"lacks 'model\.layers\.2\."),
        ({"head_dim": 2**30}, "rotates 1073741824 dimensions"),
        ({"num_hidden_layers": 1}, "holds 9 tensor.*not call for.*model.layers.1"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "scaling type 'longrope'"),
        ({"quantization_config": {"quant_method": "awq"}}, r"quantized \(awq\)"),
    ],
)
def test_a_config_that_cannot_be_built_is_refused(
    changes: dict[str, Any], message: str, checkpoint: Path, tmp_path: Path
) -> None:
    edit_config(checkpoint, **changes)
    refuse(checkpoint, tmp_path, message)


def test_qwen_with_windows_on_some_layers_is_refused(tmp_path: Path) -> None:
    window: dict[str, Any] = {
        "use_sliding_window": True,
        "sliding_window": 8,
        "max_window_layers": 1,
    }
    checkpoint = write_checkpoint(tmp_path / "mixed", "qwen2", **window)
    refuse(checkpoint, tmp_path, "asks for 1 sliding-window layers .window 8. of 2")


def test_a_tensor_missing_or_unread_is_named(checkpoint: Path, tmp_path: Path) -> None:
    edit_tensors(checkpoint, **{"lm_head.weight": None})
    refuse(checkpoint, tmp_path, "lacks 1 tensor.*'lm_head.weight'")
    edit_config(checkpoint, tie_word_embeddings=True)
    edit_tensors(checkpoint, **{"model.layers.0.extra.weight": np.zeros(3, dtype=np.float32)})
    refuse(checkpoint, tmp_path, "does not call for.*'model.layers.0.extra.weight'")


def test_an_integer_tensor_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    edit_tensors(checkpoint, **{"model.norm.weight": np.zeros(32, dtype=np.int32)})
    refuse(checkpoint, tmp_path, "model.norm.weight is stored as I32")


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_a_number_that_is_none_is_refused_by_its_tensor(
    dtype: Any, value: float, checkpoint: Path, tmp_path: Path
) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    tensors = load_file(checkpoint / "model.safetensors")
    tensors[name][-1, -1] = value
    save_file({k: v.astype(dtype) for k, v in tensors.items()}, checkpoint / "model.safetensors")
    refuse(checkpoint, tmp_path, rf"{name} holds NaN or infinite numbers")


def test_weights_that_overflow_bf16_are_refused(checkpoint: Path, tmp_path: Path) -> None:
    largest = np.full(32, np.finfo(np.float32).max, np.float32)  # rounds to infinity
    edit_tensors(checkpoint, **{"model.embed_tokens.weight": np.tile(largest, (272, 1))})
    refuse(
        checkpoint, tmp_path, "not fit bf16.*Use --weights fp32", BuildOptions(weight_type="bf16")
    )


def test_weights_that_overflow_fp16_are_refused(checkpoint: Path, tmp_path: Path) -> None:
    edit_tensors(checkpoint, **{"lm_head.weight": np.full((272, 32), 1e5, dtype=np.float32)})
    refuse(checkpoint, tmp_path, "does not fit fp16", BuildOptions(weight_type="fp16"))


def test_invalid_json_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    (checkpoint / "config.json").write_text("{")
    refuse(checkpoint, tmp_path, "no valid JSON")


def test_a_checkpoint_without_tokenizer_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    (checkpoint / "tokenizer.json").unlink()
    (checkpoint / "tokenizer_config.json").unlink()
    refuse(checkpoint, tmp_path, r"no tokenizer\.json")


@pytest.mark.parametrize("source", ["no/such/path/here", "./missing", "missing.gguf"])
def test_a_path_that_is_no_hub_id_is_refused(source: str, tmp_path: Path) -> None:
    refuse(source, tmp_path, "neither an existing path nor a hub id")


def test_offline_the_hub_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    refuse("some-org/some-model", tmp_path, "hub cannot be reached.*give a local directory")


def test_a_hub_id_in_the_local_cache_is_built_offline(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub.constants

    cache = tmp_path / "cache"
    repository, commit = cache / "models--some-org--some-model", "a" * 40
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit)
    (repository / "snapshots").mkdir()
    checkpoint.rename(repository / "snapshots" / commit)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(cache))
    manifest = build("some-org/some-model", tmp_path / "bundle")
    assert manifest.provenance.checkpoint == "some-org/some-model"


def test_a_longer_context_than_the_models_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    refuse(
        checkpoint,
        tmp_path,
        "--max-length is 257, but the model knows 256",
        BuildOptions(max_length=257),
    )


def test_a_draft_with_another_tokenizer_is_refused_with_the_first_id(
    checkpoint: Path, tmp_path: Path
) -> None:
    draft = write_checkpoint(tmp_path / "draft", "qwen3")
    write_tokenizer(draft, swapped=(70, 90))
    options = BuildOptions(DraftMethod(), draft=str(draft))
    refuse(checkpoint, tmp_path, "another tokenizer: id 70 is .* for the target and", options)


def test_a_draft_with_a_padded_vocabulary_is_accepted(checkpoint: Path, tmp_path: Path) -> None:
    draft = write_checkpoint(tmp_path / "draft", "qwen3", vocab_size=320)
    options = BuildOptions(DraftMethod(), draft=str(draft))
    manifest = build(str(checkpoint), tmp_path / "bundle", options)
    assert manifest.draft is not None
    assert manifest.draft.vocab_size == 320


def test_a_draft_with_too_few_token_ids_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    draft = write_checkpoint(tmp_path / "draft", "qwen3", vocab_size=200)
    options = BuildOptions(DraftMethod(), draft=str(draft))
    refuse(checkpoint, tmp_path, "has 200 token ids, but .* goes up to 257", options)


def test_method_and_draft_must_agree() -> None:
    with pytest.raises(ConfigError, match="needs a draft model"):
        BuildOptions(DraftMethod())
    with pytest.raises(ConfigError, match="only it takes one"):
        BuildOptions(draft="x")


def test_an_existing_output_is_kept_unless_it_is_a_bundle_to_overwrite(
    checkpoint: Path, tmp_path: Path
) -> None:
    output = tmp_path / "bundle"
    output.mkdir()
    (output / "precious").write_text("mine")
    refuse(checkpoint, tmp_path, "exists. Give --overwrite")
    refuse(checkpoint, tmp_path, "no bundle .* leaves it alone", BuildOptions(overwrite=True))
    assert (output / "precious").read_text() == "mine"
    shutil.rmtree(output)
    build(str(checkpoint), output)
    (output / "old").write_text("")
    build(str(checkpoint), output, BuildOptions(overwrite=True))
    assert not (output / "old").exists()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["bundle", "checkpoint"]


def test_a_failed_overwrite_leaves_the_old_bundle_whole(checkpoint: Path, tmp_path: Path) -> None:
    build(str(checkpoint), tmp_path / "bundle")
    edit_tensors(checkpoint, **{"model.norm.weight": np.zeros(32, dtype=np.int32)})
    refuse(checkpoint, tmp_path, "stored as I32", BuildOptions(overwrite=True))
    verify_files(tmp_path / "bundle", read_manifest(tmp_path / "bundle"))


def test_a_missing_parent_folder_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"folder .* does not exist"):
        build(str(checkpoint), tmp_path / "a" / "b")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 128 KiB; the tiny bundle needs about 220."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=128k", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("mounting a small tmpfs needs root")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_too_small_a_disk_is_refused_before_writing(checkpoint: Path, small_disk: Path) -> None:
    with pytest.raises(SpecExportError, match=r"Not enough disk space .* are needed"):
        build(str(checkpoint), small_disk / "bundle")
    assert list(small_disk.iterdir()) == []


def test_a_disk_that_fills_while_writing_leaves_nothing(
    checkpoint: Path, small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specexport.export.build.check_space", lambda output, needed: None)
    with pytest.raises(SpecExportError, match="Not enough disk space"):
        build(str(checkpoint), small_disk / "bundle")
    assert list(small_disk.iterdir()) == []


@pytest.mark.parametrize("signal_name", ["SIGINT", "SIGTERM"])
def test_an_interrupted_build_leaves_nothing(
    checkpoint: Path, tmp_path: Path, signal_name: str
) -> None:
    """The signal arrives in the middle of writing the weights."""
    script = (
        "import os, signal, sys\n"
        "from specexport import cli\n"
        "from specexport.commands import build as command\n"
        "real = command.build\n"
        "def build(model, output, options, progress, tell):\n"
        f"    def kill(*a): os.kill(os.getpid(), signal.{signal_name})\n"
        "    return real(model, output, options, kill, tell)\n"
        "command.build = build\n"
        "cli.main()\n"
    )
    output = tmp_path / "out"
    output.mkdir()
    finished = subprocess.run(
        [sys.executable, "-c", script, "build", str(checkpoint), "-o", str(output / "bundle")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == {"SIGINT": 130, "SIGTERM": 143}[signal_name]
    assert "Traceback" not in finished.stderr
    assert list(output.iterdir()) == []


def test_memory_stays_near_the_largest_tensor(tmp_path: Path) -> None:
    """A child process builds a 300 MB model of many tensors; its own memory is a fraction of it."""
    script = (
        "import resource, sys\n"
        "from pathlib import Path\n"
        "from specexport.export.build import BuildOptions, build\n"
        "import torch, transformers, onnx, safetensors.torch\n"
        "def anonymous():\n"
        "    lines = Path('/proc/self/status').read_text().splitlines()\n"
        "    return next(int(l.split()[1]) for l in lines if l.startswith('RssAnon')) / 1024\n"
        "before, peak = anonymous(), 0\n"
        "def watch(*a):\n"
        "    global peak\n"
        "    peak = max(peak, anonymous())\n"
        "build(sys.argv[1], Path(sys.argv[2]), BuildOptions(), watch)\n"
        "print(peak - before)\n"
    )
    if not Path("/proc/self/status").exists():
        pytest.skip("needs /proc")
    sizes: dict[str, Any] = {"hidden_size": 1024, "intermediate_size": 2048, "num_hidden_layers": 8}
    checkpoint = write_checkpoint(tmp_path / "large", "llama", **sizes)
    size_mb = (checkpoint / "model.safetensors").stat().st_size / 2**20
    finished = subprocess.run(
        [sys.executable, "-c", script, str(checkpoint), str(tmp_path / "bundle")],
        capture_output=True,
        text=True,
        check=True,
    )
    assert size_mb > 200
    assert float(finished.stdout) < 0.3 * size_mb


def test_overwrite_spares_what_is_no_bundle_and_what_holds_a_source(
    checkpoint: Path, tmp_path: Path
) -> None:
    foreign = tmp_path / "bundle"
    foreign.mkdir()
    (foreign / "manifest.json").write_text('{"name": "my web extension"}')
    refuse(checkpoint, tmp_path, "no bundle of this version", BuildOptions(overwrite=True))
    with pytest.raises(ConfigError, match=r"holds .* itself"):
        build(str(checkpoint), checkpoint, BuildOptions(overwrite=True))
    with pytest.raises(ConfigError, match=r"holds .* itself"):
        build(str(checkpoint), tmp_path, BuildOptions(overwrite=True))


def test_a_link_is_followed_not_replaced(checkpoint: Path, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "real")
    build(str(checkpoint), link)
    build(str(checkpoint), link, BuildOptions(overwrite=True))
    assert link.is_symlink()
    assert (tmp_path / "real" / "manifest.json").is_file()


def test_mixed_storage_types_are_kept_exactly(checkpoint: Path, tmp_path: Path) -> None:
    import ml_dtypes

    weight = load_file(checkpoint / "model.safetensors")["model.embed_tokens.weight"]
    half = weight.astype(ml_dtypes.bfloat16).astype(np.float16)
    edit_tensors(checkpoint, **{"model.embed_tokens.weight": half})
    target = build(str(checkpoint), tmp_path / "bundle").target
    assert (target.weight_type, target.is_rounded) == ("fp32", False)


def test_a_stored_output_matrix_wins_over_tied_embeddings(checkpoint: Path, tmp_path: Path) -> None:
    edit_config(checkpoint, tie_word_embeddings=True)
    manifest = build(str(checkpoint), tmp_path / "bundle")
    assert "lm_head.weight is stored and differs" in manifest.provenance.notes[0]
    embedding = load_file(checkpoint / "model.safetensors")["model.embed_tokens.weight"]
    edit_tensors(checkpoint, **{"lm_head.weight": embedding})
    assert build(str(checkpoint), tmp_path / "tied").provenance.notes == ()


def test_a_single_file_wins_over_an_index(checkpoint: Path, tmp_path: Path) -> None:
    index = {"weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}}
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps(index))
    build(str(checkpoint), tmp_path / "bundle")


@pytest.mark.parametrize("weight_map", [None, [], {}, {"a": 5}, {"a": "../outside.safetensors"}])
def test_a_damaged_index_is_refused(weight_map: Any, checkpoint: Path, tmp_path: Path) -> None:
    (checkpoint / "model.safetensors").rename(checkpoint / "model-1.safetensors")
    index = checkpoint / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map, "metadata": {}}))
    refuse(checkpoint, tmp_path, "must map tensors to file names")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("rms_norm_eps", "1e-5"),
        ("rms_norm_eps", None),
        ("rms_norm_eps", -1.0),
        ("head_dim", "16"),
        ("head_dim", 2),
        ("num_key_value_heads", 0),
        ("num_key_value_heads", [2]),
        ("vocab_size", 10**30),
        ("max_position_embeddings", 0),
        ("tie_word_embeddings", "yes"),
        ("architectures", "LlamaForCausalLM"),
        ("architectures", 5),
        ("model_type", "mistral"),
        ("rope_parameters", "linear"),
        ("rope_parameters", {"rope_theta": 0}),
        ("rope_parameters", {"rope_theta": "a"}),
        ("rope_parameters", {"rope_type": ["linear"]}),
        ("rope_parameters", {"rope_type": "linear", "factor": "2"}),
        ("rope_parameters", {"rope_type": "linear", "factor": 0}),
        ("rope_parameters", {"rope_type": "yarn", "original_max_position_embeddings": -5}),
        ("rope_parameters", {"frequency_factors": [1.0]}),
        ("quantization_config", "gptq"),
        ("eos_token_id", "257"),
        ("eos_token_id", True),
        ("eos_token_id", [[1]]),
        ("eos_token_id", 10**9),
        ("eos_token_id", -5),
    ],
)
def test_a_value_of_the_wrong_kind_is_one_clear_error(
    key: str, value: Any, checkpoint: Path, tmp_path: Path
) -> None:
    edit_config(checkpoint, **{key: value})
    (checkpoint / "generation_config.json").unlink(missing_ok=True)
    refuse(
        checkpoint,
        tmp_path,
        key.split("_", maxsplit=1)[0] + "|RoPE|rotary|Unsupported|quantized|head_dim",
    )


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", "{", r"tokenizer\.json is damaged"),
        ("tokenizer_config.json", "{bad", "no valid JSON"),
        ("tokenizer_config.json", "[]", "must hold a JSON object"),
        ("tokenizer_config.json", '{"chat_template": 5}', "chat_template must be text"),
    ],
)
def test_a_damaged_tokenizer_is_noticed_by_build(
    name: str, content: str, message: str, checkpoint: Path, tmp_path: Path
) -> None:
    (checkpoint / name).write_text(content)
    refuse(checkpoint, tmp_path, message)


def test_a_tokenizer_larger_than_the_model_is_refused(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "small", "llama", vocab_size=200, eos_token_id=1)
    refuse(checkpoint, tmp_path, "token ids up to 257 .*, the model 200")


def test_added_tokens_named_in_the_config_alone_are_added(checkpoint: Path, tmp_path: Path) -> None:
    config = json.loads((checkpoint / "tokenizer_config.json").read_text())
    added = {"256": {"content": "<bos>"}, "258": {"content": "<tool>", "special": False}}
    config["added_tokens_decoder"] = added
    (checkpoint / "tokenizer_config.json").write_text(json.dumps(config))
    build(str(checkpoint), tmp_path / "bundle")
    tokenizer = Tokenizer.from_file(str(tmp_path / "bundle" / "tokenizer" / "tokenizer.json"))
    assert tokenizer.encode("a<tool>").ids[-1] == 258
    added["300"] = {"content": "<far>"}
    (checkpoint / "tokenizer_config.json").write_text(json.dumps(config))
    shutil.rmtree(tmp_path / "bundle")
    refuse(checkpoint, tmp_path, "'<far>' .* id 300")
