"""Shows what the engine counts."""

from quintet import LLM, Counter, EngineArgs, FlexibleArgumentParser, Gauge, Histogram, SamplingParams, Vector


def main() -> None:
    args = EngineArgs.add_cli_args(FlexibleArgumentParser()).parse_args()
    llm = LLM.from_engine_args(EngineArgs.from_cli_args(args))
    for output in llm.generate(["Hello, my name is", "The sea is"], SamplingParams(temperature=0.8, max_tokens=16)):
        print(f"Prompt: {output.prompt!r}\nGenerated: {output.outputs[0].text!r}")

    for metric in llm.get_metrics():
        if isinstance(metric, Gauge):
            print(f"{metric.name} (gauge) = {metric.value}")
        elif isinstance(metric, Counter):
            print(f"{metric.name} (counter) = {metric.value}")
        elif isinstance(metric, Vector):
            print(f"{metric.name} (vector) = {metric.values}")
        elif isinstance(metric, Histogram):
            print(f"{metric.name} (histogram) of {metric.count}, {metric.sum} in all")
            for bound, count in metric.buckets.items():
                print(f"    {bound}: {count}")


if __name__ == "__main__":
    main()
