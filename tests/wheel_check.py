"""`python tests/wheel_check.py BUNDLE`: the runtime works without torch, transformers and onnx.

Run by .ci/run in an environment that has the wheel alone, and by the tests with these packages
blocked. Uses nothing of the repository but the installed package.
"""

import importlib.util
import subprocess
import sys

import specexport
from specexport.bench.prompts import shipped_prompts

HEAVY = ("torch", "transformers", "onnx", "onnx_ir", "safetensors", "gguf", "polygraphy")


def main(bundle: str) -> None:
    """Generate with every method, then try the commands."""
    print(f"specexport {specexport.__version__} from {specexport.__file__}")
    for name in HEAVY:
        assert name not in sys.modules, name
        assert importlib.util.find_spec(name) is None, f"{name} is installed"
    outputs = []
    for method in ("none", "ngram", "suffix", "draft"):
        options = specexport.EngineOptions(method=method)
        with specexport.Engine(bundle, options) as engine:
            params = specexport.SamplingParams(max_tokens=24)
            outputs.append(engine.submit("to be or not to be", params).result().token_ids)
            sampled = specexport.SamplingParams(max_tokens=8, temperature=1.0, top_p=0.9, seed=1)
            engine.submit_chat([{"role": "user", "content": "hi"}], sampled).result()
    assert all(output == outputs[0] for output in outputs)
    assert len(shipped_prompts()) == 32, "bench lacks its prompts"
    if len(sys.argv) == 2:  # blocked packages are blocked in this process only
        check_commands(bundle)
    print("4 passed, 0 failed")


def check_commands(bundle: str) -> None:
    """What needs no export package works; what does says how to get it."""
    for arguments in (("doctor",), ("inspect", bundle), ("generate", bundle, "hi", "-n", "4")):
        subprocess.run([sys.executable, "-m", "specexport", *arguments], check=True)
    command = [sys.executable, "-m", "specexport", "build", bundle, "-o", "out"]
    refused = subprocess.run(command, capture_output=True, text=True, check=False)
    assert refused.returncode == 1, refused
    assert "pip install 'specexport[export]'" in refused.stderr, refused.stderr


if __name__ == "__main__":
    main(sys.argv[1])
