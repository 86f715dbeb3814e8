"""Measures how long a device idles between steps because of the host, with a fake device of a fixed step time.

python benchmarks/overlap.py [--out benchmarks/results/overlap.json]

The ceiling is the device's own: one step after the other without a gap. Four ways of serving run in turn, in one
process, so that a busy machine slows all of them; each figure is the median of its rounds. What the host does for a
step is all of the engine, and making up the logits that a real device would compute; text is not made.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from torch import Tensor, nn  # the path is set first, so that the script runs by itself

from benchmarks.checkpoints import small
from quintet import SamplingParams
from quintet.config import EngineConfig
from quintet.engine.engine import Engine
from quintet.engine.executor.model_runner import Forward, ModelRunner
from quintet.engine.request import CoreRequest
from quintet.engine.startup import launch, prepare
from quintet.interface.platform import Capabilities, Device, State, Step
from quintet.interface.types import Batch, Outputs, ShapeBucket
from quintet.platforms import SelectedPlatform
from quintet.platforms.cpu.cpu_info import describe
from quintet.platforms.host import threads
from quintet.platforms.null.platform import Null, NullDevice

RESULTS = Path(__file__).parent / "results"
STEP = 2e-3  # seconds: about what a model of a billion parameters takes on a large GPU
BATCHES = (1, 16, 64, 256)
STEPS = 300
WARM_UP = 20
ROUNDS = 5
SPIN = 3e-4  # seconds before the end of a wait in which the clock is watched: sleeping longer than asked costs less


class Clock:
    """Time at which the device finishes its queued steps, and its idle time in total."""

    def __init__(self) -> None:
        self.free_at = 0.0
        self.idle = 0.0

    def launch(self) -> float:
        """-> when the step will be done."""
        now = time.perf_counter()
        self.idle += max(0.0, now - self.free_at)
        self.free_at = max(now, self.free_at) + STEP
        return self.free_at


def until(moment: float) -> None:
    left = moment - time.perf_counter()
    if left > SPIN:
        time.sleep(left - SPIN)
    while time.perf_counter() < moment:
        pass


def fake(clock: Clock, overlap: bool) -> SelectedPlatform:
    """The null platform on that clock."""

    class TimedDevice(NullDevice):
        def to_host(self, x: Tensor) -> Callable[[], Tensor]:
            done = clock.free_at

            def wait() -> Tensor:
                until(done)
                return x

            return wait

    class Timed(Null):
        name = "timed"

        def open(self, rank: int) -> Device:
            return TimedDevice()

        def compile(self, model: nn.Module, variants: Iterable[ShapeBucket]) -> Step:
            inner = super().compile(model, variants)

            def step(state: State, batch: Batch) -> tuple[Outputs, State]:
                clock.launch()
                return inner(state, batch)

            return step

    probed = Null.probe()
    assert isinstance(probed, Capabilities)
    return SelectedPlatform(Timed, Capabilities(devices=1, dtypes=probed.dtypes, overlap=overlap), "for a measurement")


class Waiting(ModelRunner):
    """Plans a step only after the one before has finished, as was once done for requests that need previous tokens."""

    @property
    def supports_overlap(self) -> bool:
        return False


class LookingBack(ModelRunner):
    """Starts a step's model while the one before runs, and samples after that has finished: penalties and the like."""

    def needs_previous_tokens(self, forward: Forward) -> bool:
        return True


# overlap, and the runner
WAYS: dict[str, tuple[bool, type[ModelRunner]]] = {
    "without overlap": (False, ModelRunner),
    "waiting for tokens": (True, Waiting),
    "looking back": (True, LookingBack),
    "ahead": (True, ModelRunner),
}


@dataclass(frozen=True)
class Share:
    """Share of the device's own steps per second; for the rest of the time it was idle and waited for the host."""

    way: str
    batch: int
    steps_per_s: float
    of_ceiling: float
    idle_us_per_step: float


def measure(batch: int) -> list[Share]:
    """The ways in turn."""
    rounds: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory() as folder:
        served = {way: _serve(str(small(Path(folder))), batch, *how) for way, how in WAYS.items()}
        for _ in range(ROUNDS):
            for way, (engine, clock) in served.items():
                rounds[way].append(_round(engine, clock))
    shares = []
    for way, times in rounds.items():
        rate, idle = (statistics.median(column) for column in zip(*times, strict=True))
        shares.append(Share(way, batch, round(rate, 1), round(rate * STEP, 3), round(idle * 1e6, 1)))
    return shares


def _serve(model: str, batch: int, overlap: bool, runner: type[ModelRunner]) -> tuple[Engine, Clock]:
    """Returns an engine in which `batch` requests decode, for longer than the measurement, and its clock."""
    clock, most = Clock(), ROUNDS * (STEPS + WARM_UP) + 50
    config = EngineConfig(
        model=model, device="null", load_format="dummy", skip_tokenizer_init=True, max_num_seqs=256, max_model_len=2048
    )
    engine = launch(prepare(config, fake(clock, overlap)), progress=False)
    engine._runner.__class__ = runner
    for index in range(batch):
        prompt = [(index * 31 + place) % 1000 for place in range(32)]
        wanted = SamplingParams(temperature=0, max_tokens=most, ignore_eos=True, detokenize=False)
        engine.add(CoreRequest(str(index), prompt, wanted, (0, 0), most))
    while engine.stats().scheduler.num_waiting:
        engine.step()
    return engine, clock


def _round(engine: Engine, clock: Clock) -> tuple[float, float]:
    """Steps per second, and seconds per step that the device was idle."""
    for _ in range(WARM_UP):
        engine.step()
    clock.idle, start = 0.0, time.perf_counter()
    for _ in range(STEPS):
        engine.step()
    return STEPS / (time.perf_counter() - start), clock.idle / STEPS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS / "overlap.json")
    args = parser.parse_args()
    facts = {"date": time.strftime("%Y-%m-%d"), "cpu": describe(), "cores": threads()}
    ceiling = {"step_ms": STEP * 1e3, "ceiling_steps_per_s": 1 / STEP, "steps": STEPS, "rounds": ROUNDS}
    shares = [asdict(share) for batch in BATCHES for share in measure(batch)]
    args.out.write_text(json.dumps({**facts, **ceiling, "shares": shares}, indent=2) + "\n")
    print(args.out.read_text())


if __name__ == "__main__":
    main()
