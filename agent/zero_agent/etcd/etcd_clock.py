"""Clock skew between this machine and etcd's, by the Date header of etcd's HTTP endpoint.

A clock that is far off breaks certificates and the signatures of object stores, and makes the order
of logs and every duration in `zero-ctl` wrong. No decision of a job compares clocks, so a node with
a wrong clock still trains: `--preflight` reports it as unhealthy, while an agent logs a warning and
continues, since the wrong clock may be etcd's.

Must always hold: an etcd that serves no HTTP there, or does not answer, is no complaint; every wait
ends after `_TIMEOUT_S`.
"""

from __future__ import annotations

import http.client
import ssl
import time
from email.utils import parsedate_to_datetime

from zero_agent.etcd.etcd_access import Access
from zero_orchestrator.addresses import split_host_port

FAR_S = 300.0
"""The largest tolerated skew, that of Kerberos; S3 refuses signatures from 900 s."""
_TIMEOUT_S = 2.0


def offset_s(access: Access) -> float | None:
    """Seconds that this clock is ahead of etcd's (negative: behind); None if that is unknown."""
    try:
        host, port = split_host_port(access.first)
        if access.ca is None:
            connection = http.client.HTTPConnection(host, port, timeout=_TIMEOUT_S)
        else:
            context = ssl.create_default_context(cafile=str(access.ca))
            if access.cert is not None and access.key is not None:
                context.load_cert_chain(access.cert, access.key)
            connection = http.client.HTTPSConnection(
                host, port, timeout=_TIMEOUT_S, context=context
            )
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
    """A warning if the difference of two clocks is too large; empty if it is not."""
    if offset_s is None or abs(offset_s) <= FAR_S:
        return ""
    way = "ahead of" if offset_s > 0 else "behind"
    return (
        f"this machine's clock is {abs(offset_s) / 60:.0f} min {way} etcd's; set the wrong one of "
        "the two by NTP (`chronyc tracking`): certificates, logs and durations depend on it"
    )
