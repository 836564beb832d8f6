"""Entry of the frontend process: `python -P -m workers.frontend RUN_DIR`, started by the supervisor."""

import sys

from spinf_serve import logs
from spinf_serve.supervisor.member import Member, run_child
from spinf_serve.wire.frontend import FrontendSetup


def main(member: Member) -> None:
    """Import what serving needs while the supervisor answers, then serve."""
    from workers.frontend.loop import serve

    setup = member.set_up(FrontendSetup)
    logs.setup("frontend", setup.log_format)
    serve(member, setup)


if __name__ == "__main__":
    sys.exit(run_child("frontend", main))
