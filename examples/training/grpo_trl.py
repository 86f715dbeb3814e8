"""TRL's GRPOTrainer with quintet as its sampler (vllm_mode="colocate"), on the task of grpo.py, on a CPU.

    pip install trl datasets
    python examples/training/grpo_trl.py --steps 12

TRL samples with the package `vllm`. Here modules of that name stand for it: quintet's classes have the same names.
"""

import argparse
import random
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import quintet
import quintet.sampling_params

MODEL = Path(quintet.__file__).parent / "bundled"
ENGINE = {"device": "cpu", "dtype": "float32", "kv_cache_memory_bytes": "64M"}  # beside what TRL sets


def stand_for_vllm() -> None:
    """Puts modules into the place of those of vLLM that TRL 1.16 imports. Its server mode's are there by name alone."""

    def open_engine(**settings: Any) -> quintet.LLM:
        return quintet.LLM(**{**settings, **ENGINE})

    def nothing(*_: Any, **__: Any) -> Any:
        raise NotImplementedError("weights go to an engine in this process")

    contents: dict[str, dict[str, Any]] = {
        "vllm": {name: getattr(quintet, name) for name in quintet.__all__} | {"LLM": open_engine},
        "vllm.sampling_params": dict(vars(quintet.sampling_params)),
        "vllm.utils": {},
        "vllm.utils.network_utils": {"get_ip": lambda: "127.0.0.1", "get_open_port": nothing},
        "vllm.distributed": {},
        "vllm.distributed.weight_transfer": {},
        "vllm.distributed.weight_transfer.nccl_common": {"trainer_init": nothing},
        "vllm.distributed.weight_transfer.packed_tensor": {"packed_nccl_broadcast_producer": nothing},
    }
    for name, names in contents.items():
        module = ModuleType(name)
        module.__dict__.update({each: value for each, value in names.items() if not each.startswith("__")})
        module.__spec__, module.__path__ = ModuleSpec(name, None, is_package=True), []
        sys.modules[name] = module
    sys.modules["vllm"].__version__ = "0.30.0"  # type: ignore[attr-defined]  # whose names TRL then imports


def reward(completions: list[list[dict[str, str]]], answer: list[int], **_: Any) -> list[float]:
    """1 for each answer whose last number is the double."""
    found = []
    for (message, *_more), right in zip(completions, answer, strict=True):
        digits = "".join(letter if letter.isdigit() else " " for letter in message["content"]).split()
        found.append(float(bool(digits) and digits[-1] == str(right)))
    return found


def train(steps: int, output: str) -> list[dict[str, float]]:
    """Returns TRL's log of each step."""
    stand_for_vllm()
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    rng = random.Random(0)
    numbers = [rng.randrange(50) for _ in range(20 * steps)]
    asked = [[{"role": "user", "content": f"What is double {number}?"}] for number in numbers]
    config = GRPOConfig(
        output_dir=output, use_vllm=True, vllm_mode="colocate", vllm_max_model_length=128,
        per_device_train_batch_size=64, num_generations=8, max_completion_length=24, learning_rate=5e-5,
        lr_scheduler_type="constant", max_steps=steps, logging_steps=1, beta=0.0, bf16=False, use_cpu=True,
        report_to=[], save_strategy="no", model_init_kwargs={"dtype": "float32"},
    )  # fmt: skip
    trainer = GRPOTrainer(
        model=str(MODEL),
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_dict({"prompt": asked, "answer": [2 * number for number in numbers]}),
    )
    trainer.train()
    return [each for each in trainer.state.log_history if "reward" in each]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--output", default="grpo-trl", help="folder of TRL's own files")
    args = parser.parse_args()
    for number, each in enumerate(train(args.steps, args.output), 1):
        mismatch = each["sampling/sampling_logp_difference/max"]
        print(f"step {number:3}: reward {each['reward']:.3f}, sampler and trainer differ by {mismatch:.1e}")


if __name__ == "__main__":
    main()
