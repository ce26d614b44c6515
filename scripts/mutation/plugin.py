"""The pytest plugin of the private copy: names the running test, records durations, sets limits and the order."""

import json
import os
import time
from pathlib import Path

import mutation_measure
import pytest

RECORD = os.environ.get("MUTATION_RECORD")  # where to write what ran and how long it took
LIMIT = float(os.environ.get("MUTATION_LIMIT", "inf"))  # seconds after which no further test begins
MEASURED = os.environ.get("MUTATION_MEASURED")  # the tests that an earlier, shorter measurement has
WANTED = os.environ.get("MUTATION_TESTS")  # which tests to run, in this order, each with a limit in seconds
BEGAN = time.monotonic()
tests: dict[str, dict] = {}
fixture_seconds: dict[str, float] = {}  # the setup of shared fixtures, each without those that it uses


def fixture_name(fixture) -> str:
    return f"fixture {fixture.baseid}::{fixture.argname}"


def name_context(context: str) -> None:
    if RECORD:
        mutation_measure.CONTEXT.write_text(context)
        if mutation_measure.running is not None:
            mutation_measure.running.switch_context(context)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    global current
    current = item.nodeid
    shared = [d[-1] for n, d in item._fixtureinfo.name2fixturedefs.items() if d[-1].scope != "function"]
    fixtures = sorted(fixture_name(fixture) for fixture in shared)
    tests[item.nodeid] = {"seconds": 0.0, "passed": False, "fixtures": fixtures}
    name_context(item.nodeid)
    shared_before = sum(fixture_seconds.values())
    try:
        return (yield)
    finally:
        tests[item.nodeid]["seconds"] -= sum(fixture_seconds.values()) - shared_before
        name_context("")
        if time.monotonic() - BEGAN > LIMIT:
            item.session.shouldstop = "the time to measure this file is over"


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef):
    """Count the lines that a shared fixture runs for every test that uses it, not for the first one."""
    global current
    if fixturedef.scope == "function":
        return (yield)
    outer, current = current, fixture_name(fixturedef)
    name_context(current)
    began, inner = time.monotonic(), sum(fixture_seconds.values())
    try:
        return (yield)
    finally:
        inner = sum(fixture_seconds.values()) - inner
        fixture_seconds[current] = time.monotonic() - began - inner
        current = outer
        name_context(outer)


def pytest_runtest_logreport(report):
    test = tests.get(report.nodeid)
    if test is not None:
        test["seconds"] += report.duration
        if report.when == "call":
            test["passed"] = report.passed
        elif report.failed:
            test["passed"] = False


def pytest_sessionfinish(session):
    if RECORD:
        record = {"tests": tests, "fixtures": fixture_seconds, "complete": not session.shouldstop}
        Path(RECORD).write_text(json.dumps(record))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items):
    if MEASURED:
        names = set(json.loads(Path(MEASURED).read_text()))
        items[:] = [item for item in items if item.nodeid not in names]
    if WANTED:
        limits = json.loads(Path(WANTED).read_text())
        order = {name: place for place, name in enumerate(limits)}
        items.sort(key=lambda item: order.get(item.nodeid, len(order)))
        for item in items:
            item.add_marker(pytest.mark.timeout(limits.get(item.nodeid, 60)))


current = ""
