"""Answers a conversation, and then several at once."""

from quintet import LLM, EngineArgs, FlexibleArgumentParser, SamplingParams

TALK = [
    {"role": "system", "content": "You are a helpful assistant."},
    {"role": "user", "content": "Hello!"},
    {"role": "assistant", "content": "Hello! What can I do for you?"},
    {"role": "user", "content": "Say in one sentence why the sky is blue."},
]


def main() -> None:
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    parser.set_defaults(model="bundled")
    parser.add_argument("--max-tokens", type=int, default=32)
    args = parser.parse_args()
    params = SamplingParams(temperature=0, max_tokens=args.max_tokens)
    del args.max_tokens

    llm = LLM(**vars(args))
    alone = llm.chat(TALK, params, use_tqdm=False)
    together = llm.chat([TALK for _ in range(4)], params)
    for output in [*alone, *together]:
        print(f"Prompt: {output.prompt!r}\nAnswer: {output.outputs[0].text!r}")


if __name__ == "__main__":
    main()
