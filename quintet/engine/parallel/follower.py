"""Process of a rank other than rank 0: the same engine, with the same calls in the same order."""

import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from quintet.common.processes import REFUSED, exit_process, follow_parent, read_orders
from quintet.config import EngineConfig
from quintet.engine.client import save_shards
from quintet.engine.engine import Engine
from quintet.engine.executor.engine_plan import EnginePlan
from quintet.engine.parallel import commands as inbox
from quintet.engine.parallel.adapters import agree_on_adapters
from quintet.engine.parallel.leader import run_on_all_ranks
from quintet.engine.parallel.multiproc import CLOSED
from quintet.engine.parallel.together import run_together
from quintet.engine.startup import launch, prepare
from quintet.engine.weight_transfer.orders import WEIGHT_ORDERS
from quintet.engine.weight_transfer.remote import answer_order
from quintet.hub.resolve import resolve_tokenizer
from quintet.interface.platform import Channel, DeviceLost, Recording
from quintet.interface.types import RankInfo
from quintet.model_loader.weight_files import weights_of
from quintet.structured_output.grammar import SECONDS, GrammarCompiler
from quintet.tokenizers.tokenizer import Tokenizer, load_tokenizer

logger = logging.getLogger(__name__)

COMPILE_SECONDS = 600.0  # seconds for grammars that rank 0 has compiled: every rank must get the same result


def main() -> int:
    """Follows rank 0 until that is gone, or a rank is."""
    orders = read_orders(inbox.RankStart)
    follow_parent()
    # rank 0 logs the same, if it is on this machine
    level = logging.WARNING if orders.prints_exit_reason else logging.ERROR
    logging.basicConfig(level=level, format=f"rank {orders.rank}: %(name)s: %(message)s")
    torch.set_num_threads(orders.threads)
    config = EngineConfig(**orders.engine)
    place = RankInfo(orders.rank, orders.size, orders.endpoint, config.pipeline_parallel_size)

    def say(why: str) -> None:
        print(f"rank {place.rank}: {why}", file=sys.stderr, flush=True)

    return follow(config, place, say, orders.prints_exit_reason)


def follow(config: EngineConfig, rank_info: RankInfo, say: Callable[[str], object], aloud: bool = False) -> int:
    """Runs this rank until the others end -> the exit code. `say` gets the reason if it does not start, and where
    `aloud`, the reason why it ends."""
    try:
        prepared = prepare(config, rank_info=rank_info)
    except Exception as error:  # rank 0 may not have this error itself
        say(f"{type(error).__name__}: {error}")
        return REFUSED
    channel = prepared.ranks.channel
    assert channel is not None
    try:
        grammars = grammars_of(prepared, COMPILE_SECONDS)
        engine = launch(prepared, progress=False, grammars=grammars)
        Follower(engine, prepared, channel, grammars).run()
    except DeviceLost as error:  # rank 0 reports it
        if aloud and CLOSED not in str(error):
            say(str(error))
        return 0 if CLOSED in str(error) else 1
    except BaseException as error:
        channel.abort(f"rank {rank_info.rank} of {rank_info.size} broke: {type(error).__name__}: {error}")
        return REFUSED
    return 1


def grammars_of(prepared: EnginePlan, seconds: float = SECONDS) -> GrammarCompiler:
    """Returns grammars for this rank: they compile what another process has tried."""
    config = prepared.config

    def tokenizer() -> Tokenizer | None:
        return None if config.skip_tokenizer_init else load_tokenizer(Path(resolve_tokenizer(config, prepared.folder)))

    ids = prepared.generation.get("eos_token_id", ())
    return GrammarCompiler(
        tokenizer, prepared.vocab_size, ids, config.structured_outputs_config, seconds, is_checked=True
    )


class Follower:
    """Carries out the inboxes of rank 0."""

    def __init__(self, engine: Engine, prepared: EnginePlan, channel: Channel, grammars: GrammarCompiler) -> None:
        self._engine, self._prepared, self._channel, self._grammars = engine, prepared, channel, grammars
        self._recording: Recording | None = None

    def run(self) -> None:
        """Runs until rank 0 is gone; then raises DeviceLost, if this process still runs."""
        number = 0
        while True:
            box = inbox.decode(self._channel.receive())
            number += 1
            assert box.number == number, f"inbox {box.number} came in the place of {number}"
            for item in box.items:
                self._do(item)
            self._trace(box.traced)
            if isinstance(box.collective, inbox.ConfirmAdaptersCommand):
                assert self._engine.lora is not None, "rank 0 has the same settings"
                agree_on_adapters(self._engine.lora, box.collective.references, self._channel, box.collective.waits)
            elif box.collective is None:
                self._engine.compute()
                self._engine.take_deltas()
            else:
                self._jointly(box.collective)

    def _do(self, item: inbox.RequestCommand) -> None:
        if isinstance(item, inbox.AddCommand):
            self._engine.add(item.core_request)
            self._engine.wait_for_needs()
        elif isinstance(item, inbox.AbortCommand):
            self._engine.abort(item.request_ids)
        elif isinstance(item, inbox.CompileCommand):
            self._grammars.matcher(item.grammar)  # begins
        elif isinstance(item, inbox.LoadAdapterCommand):
            assert self._engine.lora is not None, "rank 0 has the same settings"
            self._engine.lora.prepare(item.reference)  # begins
        elif isinstance(item, inbox.DropAdapterCommand):
            assert self._engine.lora is not None, "rank 0 has the same settings"
            self._engine.lora.forget(item.digest)
        elif isinstance(item, inbox.DraftCostsCommand):
            assert self._engine.drafting is not None, "rank 0 has the same settings"
            self._engine.drafting.set_costs(item.seconds)
        else:
            self._engine.reset_prefix_cache()

    def _trace(self, wanted: bool) -> None:
        """Traces steps while rank 0 does: steps of a traced rank are not replayed, and all ranks do the same."""
        if wanted and self._recording is None:
            self._recording = self._prepared.platform.profile(_drop_event)
        elif not wanted and self._recording is not None:
            self._recording.stop()
            self._recording = None

    def _jointly(self, order: inbox.CollectiveCommand) -> None:
        if isinstance(order, WEIGHT_ORDERS):
            return self._run_together(order)
        try:
            run_on_all_ranks(self._channel, lambda: run_collective(self._engine, self._prepared, order))
        except (ValueError, NotImplementedError, OSError, MemoryError) as error:  # on every rank
            logger.debug("%s", error)

    def _run_together(self, order: Any) -> None:
        controls = self._engine.controls
        try:
            controls.run(order, lambda order, work: run_together(self._channel, controls, order, work))
        except DeviceLost:
            raise
        except Exception as error:  # rank 0 has it
            logger.debug("%s", error)


def run_collective(
    engine: Engine, prepared: EnginePlan, order: inbox.CollectiveCommand | inbox.ResetPrefixCacheCommand
) -> int:
    """Carries out an order of rank 0, or of a client -> bytes that the engine freed."""
    if isinstance(order, inbox.SleepCommand):
        return engine.sleep(order.level)
    if isinstance(order, inbox.ResetPrefixCacheCommand):
        engine.reset_prefix_cache()
    elif isinstance(order, inbox.WakeUpCommand):
        engine.wake_up(order.tags)
    elif isinstance(order, inbox.SaveShardedCommand):
        save_shards(prepared, Path(order.folder))
    elif isinstance(order, inbox.ReloadCommand):
        own = order.folder == inbox.OWN_FOLDER
        path = None if order.folder is None else prepared.folder if own else Path(order.folder)
        dummy = path is None or (own and prepared.config.load_format == "dummy")
        engine.reload_weights(None if dummy or path is None else weights_of(prepared.config, path))
    return 0


def carry_out(engine: Engine, prepared: EnginePlan, work: Any) -> tuple[int, bytes]:
    """Carries out an order of a client -> bytes that the engine freed, and the result of an order about weights in
    msgpack."""
    if isinstance(work, WEIGHT_ORDERS):
        return 0, answer_order(engine.controls, work)
    return run_collective(engine, prepared, work), b""


def _drop_event(name: str, kind: str, track: int | str, begin: int, end: int) -> None:
    """Drops the event: rank 0 writes the trace."""


if __name__ == "__main__":
    exit_process(main())
