"""A program that ends without closing its engine ends well."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.turnstile import PATIENCE_S

START = """
import asyncio, atexit, os, sys, threading

def check():  # was registered first, so it runs after specexport's own
    if any(thread.name == "specexport" for thread in threading.enumerate()):
        os.write(2, b"a thread is left that the interpreter's end would kill")
        os._exit(3)

atexit.register(check)
import specexport

LONG = specexport.SamplingParams(max_tokens=200, ignore_eos=True)

def load(kind=specexport.Engine):
    return kind(sys.argv[1], specexport.EngineOptions(verify_files=False, num_threads=1))
"""
PROGRAMS = {
    "requests are running": """
engine = load()
streams = [engine.submit("to be", LONG) for _ in range(20)]
next(iter(streams[0]))
""",
    "a thread waits for a result": """
engine = load()
began = threading.Event()
def wait():
    began.set()
    engine.submit("to be", LONG).result()
threading.Thread(target=wait, daemon=True).start()
began.wait()
""",
    "a thread goes on using it": """
engine = load()
def use():
    for _ in range(3):
        assert len(engine.submit("to be", LONG).result().token_ids) == 200
threading.Thread(target=use).start()
""",
    "the engine was never used": "engines = [load(), load(specexport.AsyncEngine)]",
    "it is held in a cycle": """
class Service:
    def __init__(self):
        self.engine, self.me = load(), self
        self.stream = self.engine.submit("to be", LONG)
Service()
""",
    "an event loop ended before": """
async def main():
    engines.append(load(specexport.AsyncEngine))
    await anext((await engines[0].submit("to be", LONG)).__aiter__())
engines = []
asyncio.run(main())
""",
    "it is closed by an exception": """
try:
    with load() as engine:
        stream = engine.submit("to be", LONG)
        raise LookupError
except LookupError:
    assert stream.is_finished
""",
    "a handler of the exit closes it": """
engine = load()
atexit.register(engine.close)
engine.submit("to be", LONG)
""",
    "the process was forked": """
engine = load()
assert engine.submit("to be", LONG).result()
if (child := os.fork()) == 0:
    try:
        engine.submit("to be", LONG)
    except specexport.EngineError as error:
        assert "loaded before the process was forked" in str(error)
        os._exit(7)  # as multiprocessing does: else ONNX Runtime itself would wait for ever
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
assert engine.submit("to be", LONG).result()
""",
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_ends_while(name: str, tiny_bundle: Path) -> None:
    finished = subprocess.run(
        [sys.executable, "-W", "error", "-c", START + PROGRAMS[name], str(tiny_bundle)],
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_S,
    )
    assert finished.returncode == 0, finished.stderr
    assert finished.stderr == ""
