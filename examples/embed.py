"""Embed a bundle in a program: load, submit, stream, read statistics, close.

Usage: python examples/embed.py BUNDLE
"""

import sys

import specexport


def main(bundle: str) -> None:
    """Stream one answer, then run several requests in one batch."""
    options = specexport.EngineOptions(max_slots=4)
    with specexport.Engine(bundle, options) as engine:
        # One request, streamed. Prompts are text or token ids.
        stream = engine.submit(
            "The three primary colours are", specexport.SamplingParams(max_tokens=24)
        )
        for chunk in stream:
            print(chunk.text, end="", flush=True)
        print(f"\n[{stream.stats.acceptance.length:.2f} tokens per drafted step]")

        # Several requests share every forward pass. A seed repeats a sampled output.
        sampled = specexport.SamplingParams(temperature=0.8, top_p=0.95, seed=7, max_tokens=16)
        streams = [
            engine.submit_chat([{"role": "user", "content": f"Name a {thing}."}], sampled)
            for thing in ("fruit", "river", "planet")
        ]
        for stream in streams:
            completion = stream.result()
            print(f"{completion.text!r} ({completion.finish_reason})")

        # What cannot be served is refused at once, with the reason.
        try:
            engine.submit("")
        except specexport.RequestError as error:
            print(f"refused: {error}")

        stats = engine.stats()
        print(f"{stats.num_output_tokens} tokens in {stats.num_steps} steps")


if __name__ == "__main__":
    main(sys.argv[1])
