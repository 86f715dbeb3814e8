"""Prints text as it comes, from an event loop."""

import asyncio

from quintet import AsyncEngineArgs, AsyncLLM, FlexibleArgumentParser, RequestOutputKind, SamplingParams

PROMPTS = ["The future of artificial intelligence is", "In a galaxy far, far away", "The key to happiness is"]


async def stream(engine: AsyncLLM, prompt: str, request_id: str) -> None:
    params = SamplingParams(
        max_tokens=24, temperature=0.8, top_p=0.95, seed=42, output_kind=RequestOutputKind.DELTA
    )  # each output holds what is new
    print(f"\n{prompt!r}:", end="", flush=True)
    async for output in engine.generate(request_id=request_id, prompt=prompt, sampling_params=params):
        print("".join(completion.text for completion in output.outputs), end="", flush=True)
        if output.finished:
            print("\nfinished")


async def main() -> None:
    args = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser()).parse_args()
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs.from_cli_args(args))
    try:
        for number, prompt in enumerate(PROMPTS):
            await stream(engine, prompt, f"stream-{number}")
    finally:
        engine.shutdown()


if __name__ == "__main__":
    asyncio.run(main())
