"""Completes four prompts; the engine's settings and how tokens are drawn come from the command line."""

from quintet import LLM, EngineArgs, FlexibleArgumentParser

PROMPTS = ["Hello, my name is", "The president of the United States is", "The capital of France is", "The sea is"]


def main() -> None:
    parser = FlexibleArgumentParser()
    engine = parser.add_argument_group("engine")
    EngineArgs.add_cli_args(engine)
    engine.set_defaults(model="bundled")
    draws = parser.add_argument_group("draws")
    draws.add_argument("--max-tokens", type=int)
    draws.add_argument("--temperature", type=float)
    settings = vars(parser.parse_args())
    drawn = {name: settings.pop(name) for name in ("max_tokens", "temperature")}

    llm = LLM(**settings)
    params = llm.get_default_sampling_params()
    for name, value in drawn.items():
        if value is not None:
            setattr(params, name, value)
    for output in llm.generate(PROMPTS, params):
        print(f"Prompt: {output.prompt!r}, generated: {output.outputs[0].text!r}")


if __name__ == "__main__":
    main()
