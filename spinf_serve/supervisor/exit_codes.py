"""Exit codes of `spinf-serve serve` (2, usage, is the command line's own)."""

STOPPED = 0
FAILED = 1
ENGINE_CRASHED = 3
PORT_TAKEN = 4
CUT_OFF = 5
