"""Steps the engine itself: prompts join one after the other while those before them run."""

import argparse

from quintet import EngineArgs, FlexibleArgumentParser, LLMEngine, RequestOutput, SamplingParams


def prompts() -> list[tuple[str, SamplingParams]]:
    return [
        ("A robot may not injure a human being", SamplingParams(temperature=0.0, logprobs=1, prompt_logprobs=1)),
        ("To be or not to be,", SamplingParams(temperature=0.8, top_k=5, presence_penalty=0.2)),
        ("What is the meaning of life?", SamplingParams(n=2, temperature=0.8, top_p=0.95, frequency_penalty=0.1)),
    ]


def run(engine: LLMEngine, waiting: list[tuple[str, SamplingParams]]) -> None:
    number = 0
    while waiting or engine.has_unfinished_requests():
        if waiting:
            prompt, params = waiting.pop(0)
            engine.add_request(str(number), prompt, params)
            number += 1
        outputs: list[RequestOutput] = engine.step()
        for output in outputs:
            if output.finished:
                print(output)


def main(args: argparse.Namespace) -> None:
    run(LLMEngine.from_engine_args(EngineArgs.from_cli_args(args)), prompts())


if __name__ == "__main__":
    main(EngineArgs.add_cli_args(FlexibleArgumentParser(description=__doc__)).parse_args())
