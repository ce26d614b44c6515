"""The pytest plugin of the private copy: names the running test, records durations, sets limits and the order."""

import json
import os
from pathlib import Path

import mutation_measure
import pytest

RECORD = os.environ.get("MUTATION_RECORD")  # where to write what ran and how long it took
WANTED = os.environ.get("MUTATION_TESTS")  # which tests to run, in this order, each with a limit in seconds
tests: dict[str, dict] = {}


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
    own_module = any(fixture.scope in ("module", "class", "package") for fixture in shared)
    tests[item.nodeid] = {"seconds": 0.0, "passed": False, "fixtures": fixtures, "keeps_module": own_module}
    name_context(item.nodeid)
    try:
        return (yield)
    finally:
        name_context("")


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef):
    """Count the lines that a shared fixture runs for every test that uses it, not for the first one."""
    global current
    if fixturedef.scope == "function":
        return (yield)
    outer, current = current, fixture_name(fixturedef)
    name_context(current)
    try:
        return (yield)
    finally:
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


def pytest_sessionfinish():
    if RECORD:
        Path(RECORD).write_text(json.dumps(tests))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items):
    if WANTED:
        limits = json.loads(Path(WANTED).read_text())
        order = {name: place for place, name in enumerate(limits)}
        items.sort(key=lambda item: order.get(item.nodeid, len(order)))
        for item in items:
            item.add_marker(pytest.mark.timeout(limits.get(item.nodeid, 60)))


current = ""
