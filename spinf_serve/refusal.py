"""Why a start is refused."""


class StartRefused(Exception):
    """Something that no retry cures keeps the server or the engine from starting: exit code 1.

    The message is for the person who started it: it names the setting, file or model at fault and what to do.
    """
