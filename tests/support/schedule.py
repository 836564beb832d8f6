"""How test files are spread over the workers of `pytest -n N --dist loadfile`."""

from xdist.scheduler import LoadFileScheduling
from xdist.workermanage import WorkerController

LINE = ("tests/processes/", "tests/http/", "tests/base/hub/", "tests/base/", "tests/preprocess/", "tests/engine/")
"""From the folders whose tests mostly wait (for a start, for the end of a silence) to those whose tests compute."""


class FromBothEnds(LoadFileScheduling):
    """The first worker takes files from one end of the line, every other from the other end.

    So waiting and computing overlap, at most one test of processes runs at a time for most of the run, and what is
    left for the end are short files. What needs the GPU stays on one worker.
    """

    def _split_scope(self, nodeid: str) -> str:
        return "tests/gpu" if nodeid.startswith("tests/gpu/") else super()._split_scope(nodeid)

    def _assign_work_unit(self, node: WorkerController) -> None:
        take = min if node.gateway.id == "gw0" else max
        self.workqueue.move_to_end(take(self.workqueue, key=place), last=False)
        super()._assign_work_unit(node)


def place(file: str) -> int:
    """Where a file stands in the line: the more special folder counts; what is in none stands at its end."""
    return next((at for at, folder in enumerate(LINE) if file.startswith(folder)), len(LINE))
