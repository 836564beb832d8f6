"""The engine process. Importing this package must come before torch's first import: see below."""

import os

# Threads that wait for each other sleep instead of spinning. Spinning is ten times slower where other processes (the
# preprocess pool, on a small host) want the same cores. The OpenMP library reads it as it loads.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
