"""Plans that did not fit the memory beside what others had stored: each runs again from its start, with it all free.

What is stored for a plan lives until its last question has run, so plans that fit alone may not fit together. Those
that run go on to their ends, new ones wait, and then those that failed run one by one. Only who fails alone is refused.
"""

from collections import deque


class Apart:
    """Who failed beside others, and who came after that. Keys are the engine's numbers."""

    def __init__(self) -> None:
        self._failed: deque[int] = deque()
        self._later: list[int] = []
        self._active = False

    def __bool__(self) -> bool:
        """Whether a plan that comes now has to wait."""
        return self._active

    def __len__(self) -> int:
        return len(self._failed) + len(self._later)

    def failed(self, key: int) -> None:
        """To run again, when nothing else is stored."""
        self._failed.append(key)
        self._active = True

    def wait(self, key: int) -> None:
        """To run after those that failed."""
        self._later.append(key)

    def remove(self, key: int) -> None:
        """Unknown keys are no error."""
        self._failed = deque(k for k in self._failed if k != key)
        self._later = [k for k in self._later if k != key]

    def enter(self) -> list[int]:
        """Who may run now that nothing runs and nothing is stored: one that failed, or all that came later."""
        if self._failed:
            return [self._failed.popleft()]
        self._active = False
        entering, self._later = self._later, []
        return entering

    def clear(self) -> None:
        """Forget all."""
        self._failed.clear()
        self._later.clear()
        self._active = False
