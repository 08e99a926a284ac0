"""The job that the deployments run in these tests: that of `tests/support/cluster.py`, shorter."""

from tests.support.cluster import TINY

STEPS = 151
SAMPLES = 32 * 150 + 10
ARGUMENTS = (*TINY, f"--samples={SAMPLES}")
