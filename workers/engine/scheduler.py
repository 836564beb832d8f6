"""Which request gives what to the next pass: deficit round robin over the waiting requests. No torch.

A pass has `budget` tokens. Its free tokens are shared equally, oldest request first; what a request cannot use of its
share, because its next piece is larger, is kept for it and adds up from pass to pass. What is left over goes to the
oldest that can use it. A request whose piece was due but found no room stands first in the next pass, so neither large
requests starve small ones nor small ones large ones.

Where requests may not share a pass, they take turns.
"""

from collections.abc import Hashable
from dataclasses import dataclass

from spinf_serve.plan import ScorePlan
from workers.engine.packing import Piece, PlanCursor, Share


@dataclass(slots=True)
class _Waiting:
    key: Hashable
    cursor: PlanCursor
    credit: int = 0  # tokens it was entitled to and has not used
    blocked: bool = False  # its piece was due in the last pass and found no room


class Scheduler:
    """The waiting requests in order of arrival. Used by one thread at a time.

    shared: whether a pass may hold several requests; only on schemes whose scores do not depend on company.
    """

    def __init__(self, budget: int, max_tokens: int, *, shared: bool = True) -> None:
        self.budget, self.max_tokens, self.shared = budget, max_tokens, shared
        self._waiting: dict[Hashable, _Waiting] = {}

    def add(self, key: Hashable, plan: ScorePlan) -> None:
        """A new request, behind all others. A plan without jobs has nothing to wait for and is not kept."""
        cursor = PlanCursor(plan, self.budget, self.max_tokens)
        if not cursor.done:
            self._waiting[key] = _Waiting(key, cursor)

    def remove(self, key: Hashable) -> None:
        """Forget what the request still has to run; unknown keys are no error."""
        self._waiting.pop(key, None)

    @property
    def tokens_waiting(self) -> int:
        """Tokens of all waiting requests that no pass holds yet."""
        return sum(w.cursor.tokens_left for w in self._waiting.values())

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._waiting

    def next_pass(self) -> list[Share]:
        """The shares of the next pass, shares of one request together; empty only when nothing waits."""
        order = sorted(self._waiting.values(), key=lambda w: not w.blocked)  # stable: by arrival within each
        if not order:
            return []
        if not self.shared:
            order = order[:1]
            self._waiting[order[0].key] = self._waiting.pop(order[0].key)  # whose turn it was is the last now
        grants = {} if order[0].blocked and self._is_large(order[0]) else self._grants(order)
        shares = [
            Share(waiting.key, waiting.cursor.plan, piece)
            for waiting in order
            for piece in self._take(waiting, grants.get(waiting.key, 0))
        ]
        return shares or self._alone(order[0])

    def _is_large(self, waiting: _Waiting) -> bool:
        """Its next piece is over the budget: it has a pass to itself."""
        return waiting.cursor.next_cost() > self.budget

    def _grants(self, order: list[_Waiting]) -> dict[Hashable, int]:
        """Tokens for each request of one pass: equal shares in a round, then what is left by age."""
        free = self.budget
        quantum = max(1, free // len(order))
        grants: dict[Hashable, int] = {}
        for waiting in order:
            waiting.credit += quantum
            used = waiting.cursor.usable(min(waiting.credit, free))
            free -= used
            grants[waiting.key] = used
            waiting.blocked = used == 0 and waiting.credit >= min(waiting.cursor.next_cost(), self.budget)
        for waiting in order:
            used = waiting.cursor.usable(grants[waiting.key] + free)
            free -= used - grants[waiting.key]
            grants[waiting.key] = used
        return grants

    def _take(self, waiting: _Waiting, grant: int) -> list[Piece]:
        """Take the granted tokens and settle the account; a grant beyond the credit was a gift."""
        if not grant:
            return []
        waiting.credit, waiting.blocked = max(0, waiting.credit - grant), False
        return self._settled(waiting, waiting.cursor.take_all(grant))

    def _alone(self, waiting: _Waiting) -> list[Share]:
        """A pass for one piece that is over the budget. Its request pays for it with the shares of passes to come."""
        piece = waiting.cursor.take(self.max_tokens)
        if piece is None:
            raise AssertionError("a piece over max_tokens was admitted")
        waiting.credit, waiting.blocked = waiting.credit - piece.tokens, False
        return [Share(waiting.key, waiting.cursor.plan, p) for p in self._settled(waiting, [piece])]

    def _settled(self, waiting: _Waiting, pieces: list[Piece]) -> list[Piece]:
        if waiting.cursor.done:
            self._waiting.pop(waiting.key)
        return pieces
