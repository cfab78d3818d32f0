"""Embed a bundle in an asyncio program: several readers at once, a time limit, a graceful end.

Usage: python examples/embed_async.py BUNDLE
"""

import asyncio
import sys

import specexport


async def main(bundle: str) -> None:
    """Answer several questions at once, printing each as it comes."""
    async with specexport.AsyncEngine(bundle) as engine:

        async def answer(question: str) -> None:
            params = specexport.SamplingParams(max_tokens=16)
            async with await engine.submit(question, params, timeout_s=60) as stream:
                async for chunk in stream:
                    print(question, repr(chunk.text))

        await asyncio.gather(answer("One, two, three,"), answer("Monday, Tuesday,"))
        await engine.drain()

        # What comes too late is refused; nothing is ever dropped silently.
        try:
            await engine.submit("Four,")
        except specexport.EngineError as error:
            print(f"refused: {error}")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
