"""The engine process's socket thread."""

from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from spinf_serve.wire.queues import Inbox
from spinf_serve.wire.registry import FOR_ROLE
from workers.engine.loop import Post


class _RunsDry(deque[Any]):
    """Queued messages; what is done `when_dry` happens as soon as the thread has seen that none is left."""

    when_dry: Any = None

    def __bool__(self) -> bool:
        if len(self):
            return True
        if act := self.when_dry:
            self.when_dry = None
            act()
        return False


def test_what_is_queued_before_the_close_is_sent(tmp_path: Path) -> None:
    """Also when the thread has just looked: the last answer of an engine that ends, and why it ends."""
    told: list[Any] = []
    inbox = Inbox(str(tmp_path / "s"), FOR_ROLE["engine"])
    post = Post(SimpleNamespace(inbox=inbox, waiting=(), tell=told.append))  # type: ignore[arg-type]
    messages = _RunsDry()

    def last_words() -> None:
        messages.append(("", "last"))
        post._ends.set()

    messages.when_dry = last_words
    post._leaving = messages
    post.send("", "first")
    post._thread.join(10)
    inbox.close()
    assert told == ["first", "last"]
