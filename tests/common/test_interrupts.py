"""Ctrl-C in places where Python drops what it raises."""

import signal
import threading
import weakref

import pytest

from quintet.common.interrupts import repeated_interrupts


class Referred:
    """Something that a weak reference may have."""


def test_an_interrupt_that_a_callback_drops_comes_again(capsys: pytest.CaptureFixture[str]) -> None:
    """The import system has such callbacks: Ctrl-C in one of them was printed, and the program ran on."""
    dropped = list[str]()

    def callback(_: object) -> None:
        dropped.append("once")
        signal.raise_signal(signal.SIGINT)

    held = Referred()
    reference = weakref.ref(held, callback)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt), repeated_interrupts():
            del held
            threading.Event().wait(60)
    finally:
        signal.signal(signal.SIGINT, before)
    assert dropped == ["once"] and reference() is None
    assert capsys.readouterr().err == ""
