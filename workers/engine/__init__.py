"""The engine process. Importing this package must come before torch's first import: see below."""

import os

from workers.engine.processor import is_intel

# Threads that wait for each other sleep instead of spinning. Spinning is about a tenth faster on an idle machine, but
# ten times slower where other processes (the preprocess pool, on a small host) want the same cores. The OpenMP library
# reads this as it loads; who has the machine alone sets it to ACTIVE.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# On Intel's processors MKL otherwise sums float32 products in orders that depend on the number of rows, on the threads
# and even on where a matrix lies in memory, on some of them and for some shapes. Strict products are as fast there.
# Others are left as they are: there this mode may choose slow code, and the check at start has found nothing to mend.
# Read with the first product.
if is_intel():
    os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")
