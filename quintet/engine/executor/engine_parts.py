"""Parts that an engine is made of."""

from dataclasses import dataclass, field

from quintet.config import EngineConfig
from quintet.engine.executor.model_runner import StepRunner
from quintet.engine.lora.manager import LoRAManager
from quintet.engine.media.rotary import RotaryIndex
from quintet.engine.observability.profiler import Profiler
from quintet.engine.scheduler import Scheduler
from quintet.engine.spec_decode.drafting import Drafting
from quintet.engine.step_hook import StepHook
from quintet.structured_output.grammar import GrammarCompiler


@dataclass(frozen=True)
class EngineParts:
    """Parts of an engine, which it keeps for its life."""

    scheduler: Scheduler
    runner: StepRunner
    overlap: bool = False  # a step is started while the one before it runs
    grammars: GrammarCompiler | None = None  # None: no request may ask for structured outputs
    profiler: Profiler = field(default_factory=Profiler)
    lora: LoRAManager | None = None  # None: no request may name an adapter
    drafting: Drafting | None = None  # None: no speculative decoding
    hooks: tuple[StepHook, ...] = ()  # optional parts, in the order in which they are called
    rotary: RotaryIndex | None = None  # None: the tokens of media have one position each
    config: EngineConfig | None = None  # None: no code of the caller's extends its workers
