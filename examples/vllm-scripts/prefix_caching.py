"""Asks several questions about one long text: its pages are computed once."""

from quintet import LLM, EngineArgs, FlexibleArgumentParser, SamplingParams

TABLE = "\n".join(
    f"| {number} | guest {number} | room {100 + number} | {number % 5 + 1} nights |" for number in range(9)
)
QUESTIONS = ["Who is in room 104? Guest", "Who is in room 106? Guest", "How long does guest 8 stay?"]


def main() -> None:
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    parser.set_defaults(model="bundled", enable_prefix_caching=True)
    llm = LLM(**vars(parser.parse_args()))
    params = SamplingParams(temperature=0, max_tokens=8)
    for question in QUESTIONS:
        [output] = llm.generate(f"{TABLE}\n{question}", params, use_tqdm=False)
        print(f"{output.num_cached_tokens} of {len(output.prompt_token_ids)} tokens cached: {output.outputs[0].text!r}")


if __name__ == "__main__":
    main()
