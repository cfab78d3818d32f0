"""The command line, as a user runs it."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.tiny import write_checkpoint


def specexport(*arguments: str | Path, **kwargs: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "specexport", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, **kwargs)


def succeed(*arguments: str | Path, **kwargs: Any) -> subprocess.CompletedProcess[str]:
    finished = specexport(*arguments, **kwargs)
    assert finished.returncode == 0, finished.stderr
    return finished


COMMANDS = ("build", "generate", "chat", "validate", "tune", "bench", "inspect", "doctor")


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_examples(command: str) -> None:
    assert "Examples:" in succeed(command, "--help").stdout
    assert command in succeed("--help").stdout


def test_help_imports_nothing_heavy() -> None:
    script = (
        "import sys\nfrom specexport.cli import cli\n"
        "cli.main(['--help'], standalone_mode=False)\n"
        "heavy = {'numpy', 'torch', 'onnxruntime', 'pydantic', 'rich', 'transformers'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, capture_output=True)


def test_build_and_inspect_tell_what_was_made(tiny_checkpoint: Path, tmp_path: Path) -> None:
    bundle = tmp_path / "bundle"
    built = succeed("build", tiny_checkpoint, "-o", bundle, "-k", "3", "--max-ngram", "5")
    assert "LlamaForCausalLM" in built.stdout
    assert built.stderr == ""  # no progress bars where there is no terminal
    shown = json.loads(succeed("inspect", bundle, "--json").stdout)
    method = {"kind": "ngram", "num_speculative_tokens": 3, "max_ngram": 5, "min_ngram": 2}
    assert shown["manifest"]["method"] == method
    assert shown["validation"] is None
    text = succeed("inspect", bundle).stdout
    for word in ("ngram", "attention_mask", "target/model.weights", "never"):
        assert word in text


def test_suffix_drafting_is_built_with_its_options(tiny_checkpoint: Path, tmp_path: Path) -> None:
    bundle = tmp_path / "bundle"
    options = ("--min-match", "2", "--factor", "3", "--store-tokens", "500")
    built = succeed(
        "build", tiny_checkpoint, "-o", bundle, "--method", "suffix", *options, "--json"
    )
    method = {"num_speculative_tokens": 8, "min_match": 2, "factor": 3, "store_tokens": 500}
    assert json.loads(built.stdout)["method"] == {"kind": "suffix", **method}
    repeated = ("to be or not to be, to be or", "-n", "20", "--json")
    plain = json.loads(succeed("generate", bundle, *repeated, "--method", "none").stdout)
    found = json.loads(succeed("generate", bundle, *repeated).stdout)
    assert found["token_ids"] == plain["token_ids"]
    assert found["stats"]["drafts"] > 0


def test_build_prints_the_manifest_as_json(tiny_checkpoint: Path, tmp_path: Path) -> None:
    built = succeed("build", tiny_checkpoint, "-o", tmp_path / "b", "--method", "none", "--json")
    assert json.loads(built.stdout)["method"]["kind"] == "none"


def test_generate_streams_text_to_stdout_and_statistics_to_stderr(tiny_bundle: Path) -> None:
    finished = succeed("generate", tiny_bundle, "to be or not to be", "-n", "20")
    assert "tokens/s" in finished.stderr
    assert "tokens/s" not in finished.stdout


def test_the_prompt_may_come_from_a_file_or_standard_input(
    tiny_bundle: Path, tmp_path: Path
) -> None:
    (tmp_path / "prompt.txt").write_text("to be or not")
    options = ("-n", "8", "--json")
    results = [
        succeed("generate", tiny_bundle, "to be or not", *options),
        succeed("generate", tiny_bundle, "--file", tmp_path / "prompt.txt", *options),
        succeed("generate", tiny_bundle, "-", *options, input="to be or not"),
    ]
    ids = [json.loads(result.stdout)["token_ids"] for result in results]
    assert ids[0] == ids[1] == ids[2]
    assert len(ids[0]) == 8


def test_json_has_all_statistics(tiny_bundle: Path) -> None:
    out = succeed("generate", tiny_bundle, "ab ab ab", "-n", "30", "--json", "-k", "4").stdout
    result = json.loads(out)
    assert result["finish_reason"] in ("length", "stop")
    stats = result["stats"]
    assert stats["output_tokens"] == len(result["token_ids"])
    assert len(stats["acceptance_rate_per_position"]) <= 4
    assert stats["prefill_time_s"] > 0
    assert stats["decode_steps"] < 30


def test_a_seed_repeats_and_greedy_ignores_it(tiny_bundle: Path) -> None:
    def ids(*options: str) -> list[int]:
        out = succeed("generate", tiny_bundle, "abc", "-n", "12", "--json", *options).stdout
        found: list[int] = json.loads(out)["token_ids"]
        return found

    assert ids("-t", "1", "--seed", "1") == ids("-t", "1", "--seed", "1", "--method", "none")
    assert ids("-t", "1", "--seed", "1") != ids("-t", "1", "--seed", "2")
    assert ids("--seed", "1") == ids("--seed", "2")


def test_options_of_a_request_reach_it(tiny_bundle: Path) -> None:
    def result(*options: str) -> Any:
        out = succeed("generate", tiny_bundle, "abc", "-n", "12", "--json", *options).stdout
        return json.loads(out)

    plain = result("--ban-token-id", "257")
    token_id = plain["token_ids"][0]
    assert plain["stopped_by"] is None
    assert token_id not in result("--ban-token-id", str(token_id))["token_ids"]
    forced = result("--logit-bias", "68=100", "--logit-bias", "69=50", "--stop", "ee")
    assert forced["text"] == ""
    assert forced["token_ids"] == [68, 68]
    assert (forced["finish_reason"], forced["stopped_by"]) == ("stop", "ee")
    echoed = result("--logit-bias", "68=100", "--stop", "eee", "--include-stop", "--echo")
    assert echoed["text"] == "abceee"
    penalised = result("--logit-bias", "68=100", "--frequency-penalty", "100")
    assert penalised["token_ids"].count(68) == 1
    scored = result("--logprobs", "2", "--prompt-logprobs", "--min-tokens", "12")
    assert len(scored["logprobs"]) == len(scored["token_ids"]) == 12
    assert len(scored["logprobs"][0]["top"]) == 2
    assert scored["prompt_logprobs"][0] is None
    assert len(scored["prompt_logprobs"]) == 3


def test_several_outputs_are_printed_one_by_one(tiny_bundle: Path) -> None:
    options = ("-n", "5", "-t", "1", "--seed", "4", "--num-outputs", "2", "--best-of", "3")
    finished = succeed("generate", tiny_bundle, "abc", *options)
    assert "--- output 1" in finished.stdout
    assert "--- output 2" in finished.stdout
    found = json.loads(succeed("generate", tiny_bundle, "abc", *options, "--json").stdout)
    assert [len(output["token_ids"]) for output in found["outputs"]] == [5, 5]
    assert "logprobs" not in found["outputs"][0]


@pytest.mark.parametrize(
    ("options", "pattern"),
    [
        (("--choice", "to be", "--choice", "not"), "to be|not"),
        (("--regex", "[a-c]{2}é"), "[a-c]{2}é"),
        (("--grammar", "FOLDER/g.lark"), r"\((yes|no)\)"),
        (("--json-schema", "FOLDER/s.json", "--one-line"), r'\{"a": (true|false)\}'),
        (("--json-schema", '{"enum": [1, "zwei"]}'), '1|"zwei"'),
    ],
)
def test_structured_output_follows_its_option(
    options: tuple[str, ...], pattern: str, tiny_bundle: Path, tmp_path: Path
) -> None:
    (tmp_path / "g.lark").write_text('start: "(yes)" | "(no)"')
    schema = {
        "type": "object",
        "properties": {"a": {"type": "boolean"}},
        "required": ["a"],
        "additionalProperties": False,
    }
    (tmp_path / "s.json").write_text(json.dumps(schema))
    filled = [option.replace("FOLDER", str(tmp_path)) for option in options]
    found = json.loads(succeed("generate", tiny_bundle, "to be", *filled, "--json").stdout)
    assert re.fullmatch(pattern, found["text"])
    assert found["finish_reason"] == "stop"


def test_chat_keeps_its_turns(tiny_bundle: Path) -> None:
    lines = "hello\n/stats\n/new\n/wrong\nhi\n/bye\n"
    finished = succeed("chat", tiny_bundle, "-n", "8", input=lines)
    assert "8 tokens" in finished.stderr
    assert finished.stderr.count("/new a new conversation") == 2
    succeed("chat", tiny_bundle, "-n", "4", "--system", "Be brief.", input="hi\nagain\n")


def test_chat_past_the_cache_says_so_and_goes_on(tiny_bundle: Path) -> None:
    finished = succeed("chat", tiny_bundle, "-n", "4", input="x" * 300 + "\nhi\n")
    assert "Use /new to begin again" in finished.stderr


def test_validate_writes_and_prints_its_report(tiny_checkpoint: Path, tmp_path: Path) -> None:
    draft = write_checkpoint(tmp_path / "draft", "qwen2", seed=3)
    bundle = tmp_path / "bundle"
    succeed("build", tiny_checkpoint, "--draft", draft, "-o", bundle)
    options = ("--num-prompts", "4", "-n", "8", "--num-samples", "300")
    finished = succeed("validate", bundle, *options, "--json")
    report = json.loads(finished.stdout)
    assert report == json.loads((bundle / "validation.json").read_text())
    assert report["tensorrt"] == {"num_graphs": 3, "findings": [], "passed": True}
    assert report["passed"] is True
    assert report["num_prompts"] == 4
    assert report["max_abs_logit_diff"] < 1e-3
    assert report["top1_agreement"] == 1.0
    assert report["greedy_identical"] is True
    assert report["distribution_test"]["num_drafts"] > 0
    assert report["draft"]["passed"] is True
    assert "passed" in succeed("inspect", bundle).stdout
    assert "passed" in succeed("validate", bundle, *options).stdout


@pytest.mark.parametrize(
    ("weights", "rounded_to"), [("bf16", "bf16"), ("fp8", "fp8, embedding fp32")]
)
def test_a_rounded_bundle_is_compared_with_rounded_weights_and_its_loss_is_told(
    weights: str, rounded_to: str, tmp_path: Path
) -> None:
    checkpoint = write_checkpoint(tmp_path / "even", "llama", intermediate_size=64)
    succeed("build", checkpoint, "--weights", weights, "-o", tmp_path / "bundle")
    options = ("--num-prompts", "3", "-n", "8", "--num-samples", "200")
    report = json.loads(succeed("validate", tmp_path / "bundle", *options, "--json").stdout)
    assert report["rounded_to"] == rounded_to
    assert report["max_abs_logit_diff"] < 1e-3
    assert report["kernels"] is None  # products are of fp32
    assert 1e-7 < report["loss"]["mean_kl"] < 0.02


def test_a_quantized_bundle_is_validated_exactly_and_its_loss_is_told(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "even", "llama", intermediate_size=64)
    bundle = tmp_path / "bundle"
    types = ("--weights", "int8", "--embedding-weights", "bf16")
    built = succeed("build", checkpoint, *types, "-o", bundle)
    assert "int8, embedding bf16" in built.stdout
    assert "int8, embedding bf16" in succeed("inspect", bundle).stdout
    options = ("--num-prompts", "3", "-n", "8", "--num-samples", "200")
    report = json.loads(succeed("validate", bundle, *options, "--json").stdout)
    assert report["rounded_to"] == "int8, embedding bf16"
    assert report["max_abs_logit_diff"] < 1e-3  # the export: fp32 against fp32
    assert 0 < report["kernels"]["mean_kl"] < 0.02  # activations of 8 bits
    loss = report["loss"]
    assert loss["mean_kl"] > 0
    assert loss["reference_perplexity"] != loss["perplexity"]
    assert "LOSSY" in succeed("validate", bundle, *options).stdout


def test_validate_fails_on_another_checkpoint(tiny_bundle: Path, tmp_path: Path) -> None:
    other = write_checkpoint(tmp_path / "other", "llama", seed=5)
    options = ("--num-prompts", "3", "-n", "8", "--num-samples", "200")
    finished = specexport("validate", tiny_bundle, "--checkpoint", other, *options, "--json")
    report = json.loads(finished.stdout)
    assert finished.returncode == 1
    assert not report["passed"]
    assert not report["greedy_identical"]
    first = report["greedy"]["differences"][0]
    assert first["compared"] == "PyTorch / plain"
    assert len(first["tokens"]) == 2
    assert first["top2_gap"] > 2 * report["target"]["tolerance"]
    assert not report["distribution_test"]["passed"]
    assert not report["target"]["passed"]
    (tiny_bundle / "validation.json").unlink()


def test_doctor_says_what_works(tmp_path: Path) -> None:
    checks = json.loads(succeed("doctor", "--json").stdout)["checks"]
    by_name = {check["name"]: check for check in checks}
    assert by_name["run on any CPU"]["works"]
    assert by_name["build and validate bundles"]["works"]
    assert "run on any CPU" in succeed("doctor").stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("build", "nowhere", "-o", "x"), "neither an existing path nor a hub id"),
        (("build", "{checkpoint}", "-o", "{bundle}"), "Give --overwrite"),
        (("build", "{checkpoint}", "-o", "x", "--method", "draft"), "needs a draft model"),
        (("build", "{checkpoint}", "-o", "x", "--method", "none", "-k", "2"), "no meaning"),
        (("build", "{checkpoint}", "-o", "x", "--min-ngram", "5"), "above --max-ngram"),
        (("build", "{checkpoint}", "-o", "x", "--min-match", "2"), "no meaning for method ngram"),
        (("build", "{checkpoint}", "-o", "x", "-k", "257"), "--num-speculative-tokens is 257; inp"),
        (("build", "{checkpoint}", "-o", "x", "--max-ngram", "33"), "--max-ngram is 33; input"),
        (("build", "{checkpoint}", "-o", "x", "--acceptance", "typical:1,inf"), "a finite number"),
        (("build", "{checkpoint}", "-o", "x", "--weights", "int2"), "'int2' is not one of"),
        (("build", "{checkpoint}", "-o", "x", "--embedding-weights", "int4"), "is not one of"),
        (("build", "{checkpoint}", "-o", "x", "--draft-weights", "int4"), "for method ngram"),
        (("build", "{checkpoint}"), "Missing option '-o'"),
        (("generate", "nowhere", "hi"), "not a directory"),
        (("generate", "{bundle}", ""), "prompt is empty"),
        (("generate", "{bundle}"), "Give one prompt"),
        (("generate", "{bundle}", "x", "--file", "y"), "Give one prompt"),
        (("generate", "{bundle}", "--file", "nowhere.txt"), "cannot be read"),
        (("generate", "{bundle}", "x" * 300), "has 300 tokens; the cache holds 256"),
        (("generate", "{bundle}", "hi", "-n", "0"), "max_tokens is 0"),
        (("generate", "{bundle}", "hi", "-t", "-1"), "temperature is -1"),
        (("generate", "{bundle}", "hi", "--top-p", "2"), "top_p is 2"),
        (("generate", "{bundle}", "hi", "--num-outputs", "2"), "temperature 0 gives the same"),
        (("generate", "{bundle}", "hi", "--logprobs", "1"), "Add --json"),
        (("generate", "{bundle}", "hi", "--logit-bias", "x"), "is no bias"),
        (("generate", "{bundle}", "hi", "--min-tokens", "999"), "at most 254 tokens"),
        (("generate", "{bundle}", "hi", "--regex", "a("), "is refused: unclosed group."),
        (("generate", "{bundle}", "hi", "--regex", "a", "--choice", "b"), "--regex and --choice"),
        (("generate", "{bundle}", "hi", "--json-schema", "no.json"), "no.json cannot be read"),
        (("generate", "{bundle}", "hi", "--json-schema", "{{"), "JSON schema is no JSON"),
        (("generate", "{bundle}", "hi", "--regex", "a", "--one-line"), "--one-line says how JSON"),
        (("generate", "{bundle}", "hi", "--regex", "a", "--stop", "b"), "decides where the output"),
        (("generate", "{bundle}", "hi", "-k", "-1"), "num_speculative_tokens is -1"),
        (("generate", "{bundle}", "hi", "--method", "draft"), "no draft model"),
        (("generate", "{bundle}", "hi", "--max-length", "999"), "built for"),
        (("inspect", "nowhere"), "not a directory"),
        (("validate", "nowhere"), "not a directory"),
        (("wrong",), "No such command 'wrong'"),
    ],
)
def test_a_mistake_gets_one_clear_error(
    arguments: tuple[str, ...],
    message: str,
    tiny_checkpoint: Path,
    tiny_bundle: Path,
    tmp_path: Path,
) -> None:
    filled = [a.format(checkpoint=tiny_checkpoint, bundle=tiny_bundle) for a in arguments]
    finished = specexport(*filled, cwd=tmp_path)
    assert finished.returncode in (1, 2)
    assert message in finished.stderr
    assert finished.stderr.count("Error") == 1
    assert "Traceback" not in finished.stderr
    assert list(tmp_path.iterdir()) == []


def test_bytes_that_are_no_text_are_refused(tiny_bundle: Path) -> None:
    command = [sys.executable, "-m", "specexport", "generate", str(tiny_bundle), "-"]
    finished = subprocess.run(command, input=b"\xff\xfe\x00", capture_output=True, check=False)
    assert finished.returncode == 1
    assert b"Error" in finished.stderr
    assert b"Traceback" not in finished.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("command", [("inspect", "{bundle}"), ("generate", "{bundle}", "hi")])
def test_output_that_cannot_be_written_is_one_error(
    command: tuple[str, ...], tiny_bundle: Path
) -> None:
    filled = [word.format(bundle=tiny_bundle) for word in command]
    with Path("/dev/full").open("w") as full:
        finished = subprocess.run(
            [sys.executable, "-m", "specexport", *filled],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert finished.returncode == 1
    assert "No space left" in finished.stderr
    assert "Traceback" not in finished.stderr


def test_ctrl_c_ends_generate_quietly(tiny_checkpoint: Path, tmp_path: Path) -> None:
    """A long output is interrupted after its first text came."""
    sizes: dict[str, Any] = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 8}
    slow = write_checkpoint(tmp_path / "slow", "llama", max_position_embeddings=4096, **sizes)
    succeed("build", slow, "-o", tmp_path / "bundle")
    command = [sys.executable, "-m", "specexport", "generate", str(tmp_path / "bundle"), "hi"]
    process = subprocess.Popen(
        [*command, "-n", "4000", "--ignore-eos", "-k", "0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    assert process.stdout is not None
    assert process.stdout.read(1)
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=30)
    assert process.returncode == 130
    assert b"Interrupted" in stderr
    assert b"Traceback" not in stderr
