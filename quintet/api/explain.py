"""Reports what would run a model here, and what was rejected, without reading a weight."""

from dataclasses import dataclass

from quintet.config import EngineConfig
from quintet.engine.executor.engine_plan import EnginePlan
from quintet.engine.executor.shape_buckets import describe
from quintet.engine.startup import prepare
from quintet.ops import ProviderChoice
from quintet.platforms import PlatformCandidate, discover


@dataclass(frozen=True)
class Explanation:
    """Every choice with its reason. `str()` is the page that `quintet explain` prints."""

    model: str
    family: str
    platform: str
    detail: str
    reasons: tuple[str, ...]
    rejected: tuple[PlatformCandidate, ...]  # platforms that are not available
    ops: tuple[ProviderChoice, ...]
    memory: str
    compiled: str  # empty where shapes are free
    drafter: str = ""  # memory of a draft model or head; empty: there is none

    def __str__(self) -> str:
        lines = [f"model     {self.model} ({self.family})", f"platform  {self.platform}: {self.detail}"]
        lines += [f"          {reason}" for reason in self.reasons]
        lines += [f"          not {found.name}: {found.result}" for found in self.rejected]
        lines.append(f"memory    {self.memory}")
        lines += [f"drafter   {self.drafter}"] if self.drafter else []
        lines += [f"compiled  {self.compiled}"] if self.compiled else []
        lines.append("ops")
        width = max(len(choice.op) for choice in self.ops)
        for choice in self.ops:
            lines.append(f"  {choice.op:<{width}}  {choice.provider:<10} {choice.reason}")
            lines += [f"  {'':<{width}}  not {provider}: {why}" for provider, why in choice.rejected]
        return "\n".join(lines)


def explain(config: EngineConfig) -> Explanation:
    """ValueError and OSError say why the model would not run at all."""
    prepared = prepare(config, met=False)
    prepared.ranks.close()
    unavailable = [found for found in discover() if not found.available]
    return Explanation(
        model=prepared.config.model,
        family=prepared.hf_config.model_type,
        platform=prepared.platform.name,
        detail=prepared.capabilities.detail,
        reasons=(*prepared.reasons, *filter(None, [prepared.unproven_features])),
        rejected=tuple(unavailable),
        ops=prepared.ranks.workers[0].ops.choices,
        memory=str(prepared.memory_plan),
        compiled=describe(prepared.fixed_shapes) if prepared.fixed_shapes else "",
        drafter=_drafter_memory(prepared),
    )


def _drafter_memory(prepared: EnginePlan) -> str:
    """Memory that a draft model or head takes of what the memory plan has."""
    worker, pages = prepared.ranks.workers[0], prepared.memory_plan.num_pages
    drafter = worker.drafter
    if drafter is None:
        return ""
    own, others = ({at for each in part.mixers for at in each.tensor_indices} for part in (drafter, worker.main))
    of_a_page = sum(worker.layouts[at].nbytes for at in own - others)
    return (
        f"weights {drafter.weight_bytes / 2**30:.2f} GiB, KV cache {of_a_page * pages / 2**30:.2f} GiB: "
        f"{of_a_page / 2**10:.1f} of the {prepared.memory_plan.model_memory.page_bytes / 2**10:.1f} KiB of a page; how "
        "many drafts are accepted shows while requests run (vllm:spec_decode_*)"
    )
