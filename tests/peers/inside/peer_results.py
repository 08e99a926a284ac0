"""A plug-in of pytest: writes one line of JSON for each case of a peer's suite, as it ends.

A case that is under way when the process ends has a line "began" only.
"""

import importlib
import json
import multiprocessing
import os
import threading
from pathlib import Path

import pytest

# Ranks of a case are children of a fork server: it imports torch once for all.
multiprocessing.set_forkserver_preload(os.environ.get("PEER_PRELOAD", "").split())


def pytest_configure():
    """Let cases run on a CPU and without a network that ask for more, although they need none."""
    for module in os.environ.get("PEER_IMPORTS", "").split():
        importlib.import_module(module)
    place, _, names = os.environ.get("PEER_DECORATORS", "").partition(":")
    for name in names.split():  # decorators that skip
        setattr(importlib.import_module(place), name, lambda case: case)


def _write(**line):
    with Path(os.environ["PEER_RESULTS"]).open("a") as file:
        file.write(json.dumps(line) + "\n")


_CASE_LIMIT_S = 150
_limits = {}


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_logstart(nodeid):
    _write(case=nodeid, outcome="began", text="")
    _limits[nodeid] = threading.Timer(_CASE_LIMIT_S, os._exit, [1])
    _limits[nodeid].daemon = True
    _limits[nodeid].start()


def pytest_runtest_logfinish(nodeid):
    _limits.pop(nodeid).cancel()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_logreport(report):
    if report.outcome != "passed" or report.when == "call":
        skipped = isinstance(report.longrepr, tuple)  # path, line, reason
        text = report.longrepr[2] if skipped else str(report.longrepr or "")
        _write(case=report.nodeid, outcome=report.outcome, text=text[-6000:])


@pytest.hookimpl(tryfirst=True)
def pytest_pycollect_makeitem(collector, name, obj):
    """Fixtures of DeepSpeed that are classes, which pytest has not found since its version 8.4."""
    if isinstance(obj, type) and getattr(obj, "is_dist_fixture", False) and hasattr(obj, "run"):
        fixtures = collector.session._fixturemanager
        fixtures._register_fixture(name=name, func=obj, nodeid=collector.nodeid, scope="function")


_broken = {}


def pytest_collectreport(report):
    if report.outcome != "passed":
        _broken[report.nodeid] = text = str(report.longrepr)[-6000:]
        _write(case=report.nodeid, outcome="not collected", text=text)


def pytest_collection_modifyitems(items):
    """Keep what is asked for; pytest itself would run nothing if a name was not there."""
    asked = os.environ.get("PEER_CASES")
    if asked is None:
        return
    found = {item.nodeid: item for item in items}
    names = Path(asked).read_text().splitlines()
    items[:] = [found[name] for name in names if name in found]
    for name in names:
        if name not in found and name not in _broken:
            text = _broken.get(name.partition("::")[0])
            _write(case=name, outcome="failed" if text else "absent", text=text or "")


def pytest_collection_finish(session):
    if session.config.option.collectonly:
        for item in session.items:
            _write(case=item.nodeid, outcome="collected", text="")
