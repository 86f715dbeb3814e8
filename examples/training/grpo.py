"""GRPO (Shao et al. 2024) on the bundled model, on a CPU, in minutes: quintet samples, torch and transformers train.

    python examples/training/grpo.py
    python examples/training/grpo.py --steps 10 --output trained.json

The model is to double numbers. It was not trained for that: it can add two numbers, and now and then it does so when it
is asked for a double. A step draws NUMBERS numbers, samples GROUP answers for each, and gives 1 to an answer that is
right. Answers that are better than the others of their group become likelier. The engine then takes the new weights,
and the next step is sampled with them.
"""

import argparse
import json
import random
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

import quintet
from quintet import LLM, SamplingParams

MODEL = Path(quintet.__file__).parent / "bundled"
NUMBERS, GROUP = 8, 8  # of a step; answers for each number
MAX_TOKENS = 24
CLIP = 0.2  # of the ratio of probabilities
RATE = 5e-5  # of learning


def draw_tasks(rng: random.Random) -> list[tuple[list[dict[str, str]], int]]:
    """Conversations that ask for a double, and the doubles."""
    numbers = [rng.randrange(50) for _ in range(NUMBERS)]
    return [([{"role": "user", "content": f"What is double {number}?"}], 2 * number) for number in numbers]


def reward(text: str, right: int) -> float:
    """1 if the last number of the text is the double."""
    words = "".join(letter if letter.isdigit() else " " for letter in text).split()
    return float(bool(words) and words[-1] == str(right))


def advantages(rewards: list[float]) -> list[float]:
    """How much better each answer is than its group, in standard deviations."""
    group = torch.tensor(rewards)
    return ((group - group.mean()) / (group.std() + 1e-4)).tolist()


def logprobs(model: Any, prompts: list[list[int]], answers: list[list[int]]) -> tuple[Tensor, Tensor]:
    """Log-probabilities of the answers' tokens [N, T], and where there are tokens [N, T]."""
    longest = max(len(prompt) + len(answer) for prompt, answer in zip(prompts, answers, strict=True))
    ids = torch.zeros(len(prompts), longest, dtype=torch.long)
    mask = torch.zeros(len(prompts), longest)
    for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        ids[row, : len(prompt) + len(answer)] = torch.tensor([*prompt, *answer])
        mask[row, len(prompt) : len(prompt) + len(answer)] = 1
    found = model(ids).logits[:, :-1].log_softmax(-1).gather(2, ids[:, 1:, None])[..., 0]
    return found, mask[:, 1:]


def train(steps: int, seed: int = 0) -> list[dict[str, float]]:
    """Returns the mean reward of each step, and how far the sampler's log-probabilities are from the trainer's."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0)
    history = []
    with LLM("bundled", device="cpu", dtype="float32", kv_cache_memory_bytes="64M", use_tqdm=False) as llm:
        for step in range(steps):
            tasks = draw_tasks(rng)
            params = SamplingParams(
                temperature=1, n=GROUP, max_tokens=MAX_TOKENS, logprobs=0, seed=rng.randrange(2**31)
            )
            outputs = llm.chat([conversation for conversation, _ in tasks], params, use_tqdm=False)
            prompts, answers, old, rewards, better = [], [], [], [], []
            for output, (_, right) in zip(outputs, tasks, strict=True):
                group = [reward(each.text, right) for each in output.outputs]
                rewards += group
                better += advantages(group)
                for each in output.outputs:
                    prompts.append(output.prompt_token_ids)
                    answers.append(list(each.token_ids))
                    old.append([at[token].logprob for token, at in zip(each.token_ids, each.logprobs, strict=True)])
            found, mask = logprobs(model, prompts, answers)
            before = torch.zeros_like(found)
            before[mask.bool()] = torch.tensor([value for each in old for value in each])
            ratio = (found - before).exp()
            weight = torch.tensor(better)[:, None]
            gain = torch.minimum(ratio * weight, ratio.clamp(1 - CLIP, 1 + CLIP) * weight)
            loss = -(gain * mask).sum() / mask.sum()
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            llm.update_weights(model.named_parameters(), weight_version=f"step {step + 1}")
            mismatch = ((found.detach() - before).abs() * mask).max()
            history.append({"reward": sum(rewards) / len(rewards), "mismatch": float(mismatch)})
            print(
                f"step {step + 1:3}: reward {history[-1]['reward']:.3f}, sampler and trainer differ by {mismatch:.1e}"
            )
    return history


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, help="file for the history, in JSON")
    args = parser.parse_args()
    history = train(args.steps, args.seed)
    if args.output is not None:
        args.output.write_text(json.dumps(history, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
