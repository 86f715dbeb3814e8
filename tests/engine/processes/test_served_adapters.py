"""Orders about adapters at the engine: in turn, answered when all API processes know, and harmless if wrong."""

import threading

import pytest

from quintet.engine.processes import messages as wire
from quintet.engine.processes.served_adapters import MAX_SERVED, ServedAdapters
from quintet.lora.request import LoRAReference, LoRARequest

WAIT = 60  # seconds after which a test has hung


class Shelf:
    """References of any path; "bad" ones are refused, and one is read when `go_on` is set."""

    def __init__(self) -> None:
        self.go_on, self.removed = threading.Event(), list[str]()

    def reference(self, request: LoRARequest) -> LoRAReference:
        if request.path == "slow":
            assert self.go_on.wait(WAIT)
        errors: dict[str, Exception] = {
            "bad": ValueError("tensor 'x' has the shape [1]"), "none": FileNotFoundError("no folder"),
            "bug": KeyError("x"),
        }  # fmt: skip
        if request.path in errors:
            raise errors[request.path]
        return LoRAReference(request.name, request.path, request.path.encode())

    def remove(self, name: str) -> bool:
        self.removed.append(name)
        return True


class Wired:
    """ServedAdapters, and what they send."""

    def __init__(self, clients: tuple[int, ...] = (0,)) -> None:
        self.shelf, self.sent, self._read = Shelf(), list[tuple[int, wire.FromEngine]](), threading.Semaphore(0)
        self.served = ServedAdapters(self.shelf, lambda *each: self.sent.append(each), self._read.release)  # type: ignore[arg-type]
        for client in clients:
            self.served.join(client)

    def load(self, number: int, name: str, path: str, inplace: bool = False, worker: int = 0) -> None:
        self.served.take(wire.Order(worker, number, wire.LoadLoRA(name, path, None, inplace)))

    def unload(self, number: int, name: str) -> None:
        self.served.take(wire.Order(0, number, wire.UnloadLoRA(name)))

    def finish(self) -> None:
        """One adapter was read."""
        assert self._read.acquire(timeout=WAIT)
        self.served.finish()

    def confirm(self, client: int = 0) -> None:
        self.served.confirm(wire.HasAdapters(client, self.served.table.version))

    def answers(self) -> list[tuple[int, int, str]]:
        """Worker, number and kind of the answers, which are taken away."""
        found = [(to, each.number, each.kind) for to, each in self.sent if isinstance(each, wire.Answer)]
        self.sent.clear()
        return found

    @property
    def names(self) -> dict[str, str]:
        return {each.reference.name: each.reference.path for each in self.served.table.served}


def test_an_order_is_answered_when_every_process_knows() -> None:
    wired = Wired((0, 1, 2))
    wired.load(7, "a", "x", worker=1)
    wired.finish()
    assert {to for to, each in wired.sent if isinstance(each, wire.Adapters)} == {0, 1, 2}
    assert wired.answers() == []
    wired.confirm(1)
    wired.confirm(2)
    assert wired.answers() == []
    wired.confirm(0)
    assert wired.answers() == [(1, 7, "")]


def test_a_process_that_dies_is_not_waited_for() -> None:
    wired = Wired((0, 1))
    wired.load(7, "a", "x")
    wired.finish()
    wired.confirm(0)
    assert wired.answers() == []
    wired.served.leave(1)
    assert wired.answers() == [(0, 7, "")]


def test_a_late_confirmation_of_an_older_change_counts_for_no_newer_one() -> None:
    wired = Wired()
    wired.load(1, "a", "x")
    wired.finish()
    older = wired.served.table.version
    wired.load(2, "b", "x")
    wired.finish()
    wired.served.confirm(wire.HasAdapters(0, older))
    assert wired.answers() == [(0, 1, "")]
    wired.confirm()
    assert wired.answers() == [(0, 2, "")]


def test_orders_of_one_name_are_carried_out_in_turn_and_others_go_on() -> None:
    wired = Wired()
    wired.load(1, "a", "slow")
    wired.load(2, "a", "y")
    wired.unload(3, "a")
    wired.load(4, "b", "z")
    wired.finish()
    wired.confirm()
    assert wired.answers() == [(0, 4, "")] and wired.names == {"b": "z"}
    wired.shelf.go_on.set()
    wired.finish()
    wired.confirm()
    assert wired.answers() == [(0, 2, wire.ADAPTER_TAKEN), (0, 1, ""), (0, 3, "")]
    assert wired.names == {"b": "z"} and wired.shelf.removed == ["a"]


def test_inplace_gives_the_name_to_other_files_and_keeps_its_place() -> None:
    wired = Wired()
    for number, (name, path, inplace) in enumerate([("a", "x", False), ("b", "x", False), ("a", "y", True)]):
        wired.load(number, name, path, inplace)
        wired.finish()
    assert list(wired.names.items()) == [("a", "y"), ("b", "x")]


def test_numbers_stay_when_others_are_unloaded() -> None:
    wired = Wired()
    wired.served.load_at_start([wire.LoadLoRA(name, "x") for name in "abc"])
    wired.unload(1, "a")
    for number, (name, inplace) in enumerate([("b", True), ("a", False)], 2):
        wired.load(number, name, "y", inplace)
        wired.finish()
    assert {each.reference.name: each.number for each in wired.served.table.served} == {"b": 1, "c": 2, "a": 3}


@pytest.mark.parametrize(
    ("path", "kind"), [("bad", "ValueError"), ("none", wire.ADAPTER_UNKNOWN), ("bug", "ValueError")]
)
def test_what_is_wrong_is_refused_and_changes_nothing(path: str, kind: str) -> None:
    wired = Wired()
    wired.load(1, "a", "x")
    wired.finish()
    wired.confirm()
    wired.answers()
    wired.load(2, "a", path, inplace=True)
    wired.finish()
    assert wired.answers() == [(0, 2, kind)] and wired.names == {"a": "x"}


def test_unknown_names_and_engines_without_adapters_refuse() -> None:
    wired = Wired()
    wired.unload(1, "a")
    assert wired.answers() == [(0, 1, wire.ADAPTER_UNKNOWN)]
    sent: list[tuple[int, wire.FromEngine]] = []
    off = ServedAdapters(None, lambda *each: sent.append(each), lambda: None)
    off.take(wire.Order(0, 2, wire.LoadLoRA("a", "x")))
    assert isinstance(sent[0][1], wire.Answer) and "--enable-lora" in sent[0][1].refused


def test_names_are_bounded() -> None:
    wired = Wired()
    wired.served.load_at_start([wire.LoadLoRA(str(at), "x") for at in range(MAX_SERVED)])
    wired.load(1, "one more", "x")
    assert wired.answers() == [(0, 1, "ValueError")]


def test_a_start_with_a_wrong_adapter_names_it() -> None:
    wired = Wired()
    with pytest.raises(ValueError, match="lora_modules: b=bad: tensor 'x'"):
        wired.served.load_at_start([wire.LoadLoRA("a", "x"), wire.LoadLoRA("b", "bad")])


def test_messages_cross_the_wire() -> None:
    wired = Wired()
    wired.served.load_at_start([wire.LoadLoRA("a", "x", "base")])
    assert wire.decode_from_engine(wire.encode(wired.served.table)) == wired.served.table
    order = wire.Order(1, 2, wire.LoadLoRA("a", "x", "base", True))
    assert wire.decode_to_engine(wire.encode(order)) == order
