"""Ctrl-C at every place where Python takes signals: the start of a function, and the return of one written in C."""

import dis
import sys
from collections.abc import Callable, Iterator
from types import CodeType, FrameType
from typing import Any

_CALLS = ("CALL", "CALL_FUNCTION_EX", "JUMP_BACKWARD")


class _Countdown:
    """A trace function that raises KeyboardInterrupt at the nth place below the call it is set for."""

    def __init__(self, places: int) -> None:
        self.left = places
        self._last: dict[FrameType, int] = {}  # the instruction that ran last, unless a function in Python ran since
        self._calls: dict[CodeType, frozenset[int]] = {}

    def __call__(self, frame: FrameType, event: str, _argument: Any) -> "_Countdown":
        frame.f_trace_opcodes = True
        if event == "call":
            if frame.f_back is not None:
                self._last.pop(frame.f_back, None)
            self._pass()
        elif event == "opcode":
            if self._last.get(frame) in self._places(frame.f_code):
                self._pass()
            self._last[frame] = frame.f_lasti
        return self

    def _pass(self) -> None:
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt

    def _places(self, code: CodeType) -> frozenset[int]:
        if code not in self._calls:
            found = (at.offset for at in dis.get_instructions(code) if at.opname in _CALLS)
            self._calls[code] = frozenset(found)
        return self._calls[code]


def interrupted_everywhere(call: Callable[[], object]) -> Iterator[KeyboardInterrupt]:
    """Call again and again, interrupted at the first place, at the second, until it ends before its turn.

    Yields each interrupt, with the frames that it keeps alive, as an interactive session keeps those of the last one.
    """
    places = 0
    while True:
        places += 1
        before = sys.gettrace()
        sys.settrace(_Countdown(places))
        try:
            call()
        except KeyboardInterrupt as interrupt:
            sys.settrace(before)
            yield interrupt
        else:
            return
        finally:
            sys.settrace(before)
