"""Groups of layers that keep alike, and where each layer's tensors lie in the state.

Pages come out of one pool, and a page of any group takes the same bytes: the groups have equally many layers, and the
j-th layers of all groups share one tensor of the state, in which each page belongs to one group at a time (as in
vLLM's hybrid cache). Layers whose tensors have another shape than most share none: each has tensors of its own beside
the shared ones, and a page of any group lies in these too.

Layers that read an encoder's rows make one group of pages, behind those of tokens. A request holds as many of its
pages as the rows take, all at once, and those of requests with the same media are the same (engine/encoder/cache.py).

Layers that keep a state per request, of whatever shape, make one group together, the last. Each has a tensor of its
own, with a place for each slot; slots have a pool of their own.
"""

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from quintet.interface.types import Layout
from quintet.layers.layer_state import LayerMixer

# the largest kind of layers has so many times the smallest at most, where all make one group each
MAX_SIZE_RATIO = 1.25


@dataclass(frozen=True)
class KVCacheGroup:
    """Positions of each request that one group of layers keeps pages for."""

    window: int | None = None  # positions that later tokens can see; None: all
    chunked: bool = False  # those from the last multiple of `window` on (Llama 4), and not the last so many
    cross: bool = False  # an encoder's rows, instead of positions of the request

    def first_visible(self, computed: int) -> int:
        """The first position that the token after `computed` of them can see."""
        if self.chunked and self.window is not None:
            return computed - computed % self.window
        return 0 if self.window is None else max(0, computed - self.window + 1)

    def max_pages(self, tokens: int, page_size: int, step: int) -> int:
        """The most that a request of so many tokens holds, where it has `step` tokens in a step at most: behind a
        window, what the step's first token sees and the step itself, a stretch that may begin within a page."""
        whole = -(-tokens // page_size)
        return whole if self.window is None else min(whole, -(-(self.window - 1 + step) // page_size) + 1)


@dataclass(frozen=True)
class KVCacheLayout:
    """The groups of a model, and one layout for each tensor of its state."""

    groups: tuple[KVCacheGroup, ...]  # of pages, of the requests' own tokens
    layouts: tuple[Layout, ...]
    states: tuple[Layout, ...] = ()  # one for each tensor that has slots; these come last
    has_states: bool = False  # whether layers keep states, on whatever stage
    encoder_rows: int = 0  # of a request's media, which layers read; 0: none do
    max_drafts: int = 0  # of a request in a step, that states keep apart; 0: states hold them

    @property
    def indices(self) -> range:
        """Indices of all groups: of tokens' pages, perhaps of an encoder's rows, and perhaps of states."""
        return range(len(self.groups) + self.has_cross + self.has_states)

    @property
    def has_cross(self) -> bool:
        """True if layers read an encoder's rows."""
        return self.encoder_rows > 0

    def encoder_pages(self, page_size: int) -> int:
        """Pages that the rows of one request's media take."""
        return -(-self.encoder_rows // page_size)

    @property
    def state_columns(self) -> int:
        """Columns of the table of states: slots, and perhaps numbers of drafts."""
        return 4 if self.max_drafts else 2

    @property
    def slot_bytes(self) -> int:
        """Bytes of the state of one request, on one device."""
        return sum(layout.nbytes for layout in self.states)

    def table_widths(self, pages: int, encoder_pages: int = 0) -> tuple[int, ...]:
        """Columns of each group's table, for requests of so many pages, and as many of an encoder's rows."""
        return (pages,) * len(self.groups) + (encoder_pages,) * self.has_cross + (self.state_columns,) * self.has_states

    @property
    def page_bytes(self) -> int:
        """Bytes of a page of one group, on one device."""
        return sum(layout.nbytes for layout in self.layouts)

    def max_pages(self, tokens: int, page_size: int, step: int) -> int:
        """The most that a request of so many tokens holds, over all groups."""
        own = sum(kept.max_pages(tokens, page_size, step) for kept in self.groups)
        return own + self.encoder_pages(page_size)


def group_layers(
    mixings: Sequence[LayerMixer], here: Collection[LayerMixer] | None = None, encoder_rows: int = 0
) -> KVCacheLayout:
    """Settles the group and the places of every mixing of a model. Groups are the model's; layouts, and places in them,
    are of those that are `here`, on this stage. `encoder_rows`: of a request's media, that layers read."""
    here = set(mixings) if here is None else here
    keeping = [mixing for mixing in mixings if mixing.layouts]
    stateful = [mixing for mixing in keeping if {layout.unit for layout in mixing.layouts} == {"request"}]
    paged = _page_layout([mixing for mixing in keeping if mixing not in stateful], here, encoder_rows)
    states: list[Layout] = []
    for mixing in stateful:
        place = len(paged.layouts) + len(states)
        mixing.group = len(paged.groups) + paged.has_cross
        mixing.tensor_indices = range(place, place + len(mixing.layouts))
        states += mixing.layouts if mixing in here else ()
    return replace(paged, states=tuple(states), has_states=bool(stateful))


def _page_layout(mixings: Sequence[LayerMixer], here: Collection[LayerMixer], encoder_rows: int) -> KVCacheLayout:
    """Returns the arrangement of the layers that keep pages."""
    kinds: dict[KVCacheGroup, list[LayerMixer]] = {}
    for mixing in sorted(mixings, key=lambda each: each.is_cross):  # those come last
        kinds.setdefault(_group_of(mixing), []).append(mixing)
    if not kinds:
        return KVCacheLayout((), ())
    common = Counter(_shape(mixing) for mixing in mixings).most_common(1)[0][0]
    alike = {kind: [each for each in members if _shape(each) == common] for kind, members in kinds.items()}
    shared = {kind: members for kind, members in alike.items() if members}
    # Pages of layers that see all grow with a request, and have the tensors of a group beside their own (Gemma 4)
    odd = [len(ms) for kind, ms in kinds.items() if kind.window is None and not kind.cross and kind not in shared]
    windowed = all(kind.window is not None for kind in shared)
    groups = _equal_groups(shared, min(odd) if odd and windowed else len(mixings))
    layouts: list[Layout] = []
    for index, (_, members) in enumerate(groups):
        place = 0
        for mixing in members:
            mixing.group, mixing.tensor_indices = index, range(place, place + len(mixing.layouts))
            if mixing not in here:
                continue
            place += len(mixing.layouts)
            if place > len(layouts):
                layouts += mixing.layouts
    keeps = [kind for kind, _ in groups]
    for kind, members in kinds.items():
        for mixing in members:
            if _shape(mixing) == common:
                continue
            if kind not in keeps:
                keeps.append(kind)
            mixing.group = keeps.index(kind)
            mixing.tensor_indices = range(len(layouts), len(layouts) + len(mixing.layouts))
            layouts += mixing.layouts if mixing in here else ()
    own = tuple(each for each in keeps if not each.cross)
    if keeps[len(own) :] not in ([], [KVCacheGroup(cross=True)]) or (len(own) < len(keeps)) != bool(encoder_rows):
        raise ValueError(f"{len(keeps) - len(own)} groups of layers read {encoder_rows} rows of an encoder; one may")
    return KVCacheLayout(own, tuple(layouts), encoder_rows=encoder_rows)


def _shape(mixing: LayerMixer) -> tuple[object, ...]:
    return tuple((layout.dtype, layout.shape, layout.shards) for layout in mixing.layouts)


def _group_of(mixing: LayerMixer) -> KVCacheGroup:
    keeps = {KVCacheGroup(layout.window, layout.chunked, layout.cross) for layout in mixing.layouts}
    if len(keeps) > 1 or {layout.unit for layout in mixing.layouts} != {"page"}:
        raise ValueError(f"a layer keeps {mixing.layouts}: pages of one window, or states, are all that is kept here")
    return next(iter(keeps))


def _equal_groups(
    kinds: dict[KVCacheGroup, list[LayerMixer]], most: int
) -> list[tuple[KVCacheGroup, list[LayerMixer]]]:
    """Groups of equally many layers, and at most so many: as many as the rarest kind has, or the commonest where they
    are nearly as many."""
    counts = [len(members) for members in kinds.values()]
    size = min(most, max(counts) if max(counts) <= MAX_SIZE_RATIO * min(counts) else min(counts))
    return [(keeps, ms[first : first + size]) for keeps, ms in kinds.items() for first in range(0, len(ms), size)]
