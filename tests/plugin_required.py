"""A pytest plugin: with CLUSTER_TRAIN_REQUIRE_ALL=1, what would be skipped for want of a real component fails instead.

On a developer's machine without sshd, Docker or the training stack those tests skip and say why. In CI a skip would be
a hole that nobody sees.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

REQUIRED_MARKERS = ("ssh", "cluster", "stack")
REQUIRED_FOLDERS = ("ssh", "cluster")


def pytest_report_header() -> str | None:
    return "skipped ssh, cluster and stack tests count as failures" if _required() else None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    report = yield
    if _required() and report.skipped and not hasattr(report, "wasxfail"):
        marker = next((name for name in REQUIRED_MARKERS if item.get_closest_marker(name)), None)
        if marker:
            _fail(report, f"this {marker} test must run here")
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Iterator[None]:
    report = yield
    if _required() and report.skipped and collector.path.parent.name in REQUIRED_FOLDERS:
        _fail(report, f"the tests of {collector.path.name} must run here")
    return report


def _required() -> bool:
    return os.environ.get("CLUSTER_TRAIN_REQUIRE_ALL") == "1"


def _fail(report: pytest.TestReport | pytest.CollectReport, why: str) -> None:
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
    report.outcome = "failed"
    report.longrepr = f"{why} (CLUSTER_TRAIN_REQUIRE_ALL=1), but was skipped: {reason}"
