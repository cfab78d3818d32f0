"""`specexport bench`, as a user runs it."""

import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from specexport.cli import cli
from specexport.export.build import BuildOptions, build
from specexport.export.methods import NoMethod

SMALL = ("--requests", "3", "-n", "8", "--rounds", "1", "--concurrency", "1,2", "--threads", "1")


@pytest.fixture(scope="module")
def bundle(tiny_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy, for adaptive drafting writes what steps cost into it."""
    copy = tmp_path_factory.mktemp("bench") / "bundle"
    return Path(shutil.copytree(tiny_bundle, copy))


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    chat = {"messages": [{"role": "user", "content": "one two three, one two three, one"}]}
    path.write_text(f'{{"prompt": "to be or not to be, to be"}}\n{json.dumps(chat)}\n')
    return path


def bench(*arguments: str | Path) -> Result:
    return CliRunner().invoke(cli, ["bench", *map(str, arguments)])


def succeed(*arguments: str | Path) -> Result:
    finished = bench(*arguments)
    assert finished.exit_code == 0, finished.stderr
    return finished


def test_tables_go_to_stdout_and_figures_to_files(bundle: Path, prompts: Path) -> None:
    folder = prompts.parent
    files = ("--json", folder / "x.json", "--plot", folder / "x.png")
    finished = succeed(bundle, *SMALL, "--prompts", prompts, *files)
    for word in ("requests/s", "off", "fixed", "adaptive", "identical", "first token, ms"):
        assert word in finished.stdout
    assert finished.stderr == ""  # no progress bar where there is no terminal
    assert (folder / "x.png").read_bytes().startswith(b"\x89PNG")
    report = json.loads((folder / "x.json").read_text())
    assert report["method"] == "ngram"
    assert "onnxruntime" in report["machine"]
    assert report["settings"]["prompts"] == str(prompts)
    assert [load["num_clients"] for load in report["loads"]] == [1, 2]
    for load in report["loads"]:
        off, fixed, adaptive = load["variants"]
        assert [v["variant"] for v in (off, fixed, adaptive)] == ["off", "fixed", "adaptive"]
        assert off["tokens_per_s"] > 0
        assert off["speedup"] == 1
        assert off["drafting"]["drafts"] == 0
        assert fixed["drafting"]["drafts"] > 0
        assert fixed["greedy_requests_compared"] == 3
        assert fixed["greedy_requests_different"] == adaptive["greedy_requests_different"] == 0
        assert fixed["drafting"]["output_tokens"] == off["drafting"]["output_tokens"]
        assert off["first_token_s"]["p50"] <= off["latency_s"]["p50"]


def test_json_on_stdout_leaves_the_tables_to_stderr(bundle: Path, prompts: Path) -> None:
    options = ("--rate", "50,200", "--max-slots", "2", "-k", "4,2", "-t", "0.8", "--json", "-")
    common = ("--prompts", prompts, "--requests", "3", "-n", "6", "--rounds", "2", "--threads", "1")
    finished = succeed(bundle, *common, *options)
    report: dict[str, Any] = json.loads(finished.stdout)
    assert "arriving" in finished.stderr
    assert "sampled" in finished.stderr
    assert [load["rate_per_s"] for load in report["loads"]] == [50, 200]
    variants = report["loads"][0]["variants"]
    assert [variant["variant"] for variant in variants] == ["off", "K=2", "K=4", "adaptive"]
    assert [variant["greedy_requests_compared"] for variant in variants] == [0] * 4
    assert all(len(variant["rounds"]) == 2 for variant in variants)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "shipped prompt 8 has"),
        (("--prompts", "no.txt"), "no.txt cannot be read"),
        (("--concurrency", "1", "--rate", "2"), "--concurrency and --rate"),
        (("--concurrency", "2,0"), "0 is not in the range"),
        (("--concurrency", "2,"), "'' is not a valid integer"),
        (("--rate", "1,0"), "arrivals is 0 requests/s; it must be a number above 0"),
        (("--rate", "nan"), "arrivals is nan requests/s"),
        (("--max-slots", "2"), "with --rate alone"),
        (("--json", "no/x.json"), "no/x.json cannot be written: No such"),
        (("--plot", "x.jpg"), "must end in .png"),
        (("--plot", "-"), "must end in .png"),
        (("-n", "256"), "room for 0 beside"),
        (("-k", "300", "--prompts", "{prompts}"), "num_speculative_tokens is 300"),
        (("--method", "draft", "--prompts", "{prompts}"), "has no draft model"),
        (("--method", "none"), "'none' is not one of"),
    ],
)
def test_a_mistake_gets_one_clear_error(
    options: tuple[str, ...],
    message: str,
    bundle: Path,
    prompts: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(prompts.parent)
    filled = [option.format(prompts=prompts) for option in options]
    finished = bench(bundle, *filled)
    assert finished.exit_code in (1, 2)
    assert message in finished.stderr
    assert finished.stderr.count("Error") == 1
    assert list(prompts.parent.iterdir()) == [prompts]


def test_a_bundle_without_drafting_needs_a_method(
    tiny_checkpoint: Path, prompts: Path, tmp_path: Path
) -> None:
    plain = tmp_path / "plain"
    build(str(tiny_checkpoint), plain, BuildOptions(NoMethod()))
    refused = bench(plain, *SMALL, "--prompts", prompts)
    assert refused.exit_code == 1
    assert "there is nothing to compare. Choose --method" in refused.stderr
    shown = succeed(plain, *SMALL, "--prompts", prompts, "--method", "suffix")
    assert "drafts by suffix" in shown.stdout


def test_a_missing_matplotlib_is_named_before_anything_runs(
    bundle: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    refused = bench(bundle, *SMALL, "--prompts", prompts, "--plot", prompts.with_name("x.png"))
    assert refused.exit_code == 1
    assert "pip install 'specexport[bench]'" in refused.stderr
    assert "tokens/s" in succeed(bundle, *SMALL, "--prompts", prompts).stdout


def test_ctrl_c_ends_a_benchmark_quietly(tiny_bundle: Path, prompts: Path) -> None:
    bundle = Path(shutil.copytree(tiny_bundle, prompts.with_name("bundle")))
    command = [sys.executable, "-m", "specexport", "bench", str(bundle), "--prompts", str(prompts)]
    json_file = prompts.with_name("x.json")
    process = subprocess.Popen(
        [*command, "--requests", "20000", "--json", str(json_file)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    while not (bundle / "tuning.json").exists():  # the last thing before requests are sent
        assert process.poll() is None
        time.sleep(0.02)
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=30)
    assert process.returncode == 130
    assert stdout == b""
    assert stderr.strip() == b"Interrupted."
    assert not json_file.exists()
