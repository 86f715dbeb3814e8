"""The memory plan as plain data: hypothesis plays states, and the plan is checked after each decision."""

from hypothesis import given, settings
from hypothesis import strategies as st

from quintet.router.models.planner import (
    FAIR_SECONDS,
    MemoryLedger,
    ModelSize,
    ModelSlot,
    ModelState,
    ModelTooLarge,
)

slots = st.builds(
    lambda size, state, pinned, in_flight, last_used: ModelSlot(
        "", pinned, ModelSize(size, size // 3), state, in_flight if state is ModelState.LOADED else 0, 0, last_used,
        is_asleep=state is ModelState.SLEEPING,
    ),
    st.integers(1, 12), st.sampled_from(ModelState), st.booleans(), st.integers(0, 2), st.integers(0, 5),
)  # fmt: skip


@settings(max_examples=400, deadline=None)
@given(st.lists(slots, min_size=1, max_size=6), st.integers(0, 20), st.floats(0, 10))
def test_what_is_decided_keeps_every_promise(found: list[ModelSlot], spare: int, waited: float) -> None:
    for number, slot in enumerate(found):
        slot.name = str(number)
    ledger = MemoryLedger(sum(each.planned for each in found) + spare, found)
    wanted = found[0]
    wanted.in_flight = 0
    if wanted.state not in (ModelState.UNLOADED, ModelState.SLEEPING):
        return
    assert wanted.size is not None
    try:
        room = ledger.room_for(wanted, waited)
    except ModelTooLarge:
        kept = sum(each.size.loaded for each in found[1:] if each.pinned and each.planned and each.size is not None)
        assert wanted.size.loaded + kept > ledger.budget
        return
    for slot in (*room.unload, *room.hold):
        assert not slot.pinned and slot is not wanted
        assert slot.state in (ModelState.LOADED, ModelState.SLEEPING)
    assert not any(each.in_flight for each in room.unload), "an engine with requests is never unloaded"
    assert not room.hold or waited >= FAIR_SECONDS
    if room.fits:
        assert not room.unload and not room.hold
        wanted.state, wanted.is_asleep = ModelState.LOADING, False
        assert ledger.planned <= ledger.budget
        return
    kept_idle = [each for each in found if each.can_be_unloaded and each not in room.unload and each is not wanted]
    for each in room.unload:
        assert all(each.last_used <= other.last_used for other in kept_idle if other.planned)
    if room.unload:  # once those and the ones that end now have ended, it fits
        for each in found:
            if each in room.unload or each.state is ModelState.UNLOADING:
                each.state = ModelState.UNLOADED
        assert ledger.room_for(wanted, waited).fits


def test_an_engine_that_ends_is_waited_for_instead_of_ending_another() -> None:
    ending, idle = (
        ModelSlot(name, size=ModelSize(10), state=state)
        for name, state in (("ending", ModelState.UNLOADING), ("idle", ModelState.LOADED))
    )
    wanted = ModelSlot("wanted", size=ModelSize(10))
    ledger = MemoryLedger(20, [ending, idle, wanted])
    assert ledger.room_for(wanted, 0.0) == (False, (), ())
    ending.state = ModelState.UNLOADED
    assert ledger.room_for(wanted, 0.0).fits
