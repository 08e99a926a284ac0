"""Whether this machine's clock agrees with that of etcd's machine, by the date etcd's HTTP has.

A clock that is far off breaks certificates and the signatures of object stores, and makes the order
of logs and every age in `zero-ctl` wrong. No decision of a job compares clocks, so a node with a
wrong one still trains: `--preflight` calls it unhealthy, an agent says so and goes on, since the
wrong clock may as well be etcd's.

Must always hold: an etcd that serves no HTTP there, or does not answer, is no complaint; nothing is
waited for longer than `_TIMEOUT_S`.
"""

from __future__ import annotations

import http.client
import ssl
import time
from email.utils import parsedate_to_datetime

from zero_agent.etcd.etcd_access import Access
from zero_orchestrator.addresses import split_host_port

FAR_S = 300.0
"""What Kerberos tolerates; S3 refuses signatures from 900 s."""
_TIMEOUT_S = 2.0


def offset_s(access: Access) -> float | None:
    """Seconds that this clock is ahead of etcd's (negative: behind); None if it does not tell."""
    try:
        connection = _connection(access, *split_host_port(access.first))
        try:
            began_s = time.time()
            connection.request("GET", "/version")
            date = connection.getresponse().getheader("Date")
            now_s = (began_s + time.time()) / 2
        finally:
            connection.close()
        return None if date is None else now_s - parsedate_to_datetime(date).timestamp()
    except (OSError, http.client.HTTPException, ValueError):
        return None


def complaint(offset_s: float | None) -> str:
    """What is wrong with this difference of two clocks; empty: nothing."""
    if offset_s is None or abs(offset_s) <= FAR_S:
        return ""
    way = "ahead of" if offset_s > 0 else "behind"
    return (
        f"this machine's clock is {abs(offset_s) / 60:.0f} min {way} etcd's; set whichever of the "
        "two is wrong by NTP (`chronyc tracking`): certificates, logs and ages depend on it"
    )


def _connection(access: Access, host: str, port: int) -> http.client.HTTPConnection:
    if access.ca is None:
        return http.client.HTTPConnection(host, port, timeout=_TIMEOUT_S)
    context = ssl.create_default_context(cafile=str(access.ca))
    if access.cert is not None and access.key is not None:
        context.load_cert_chain(access.cert, access.key)
    return http.client.HTTPSConnection(host, port, timeout=_TIMEOUT_S, context=context)
