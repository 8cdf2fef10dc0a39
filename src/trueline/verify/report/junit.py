"""A report as JUnit XML: a suite for each group, a case for each check.

There are several schemas for it; this is what Ant's, Jenkins's and GitLab's readers all accept."""

from __future__ import annotations

import re
from xml.etree import ElementTree as ET

from trueline.verify.report import Check, Report, Status, wording

NO_HOST = "localhost"
"""Ant's schema wants a name, and a report goes to others."""


def junit_xml(report: Report) -> str:
    suites = ET.Element("testsuites")
    for index, group in enumerate(wording.groups(report.checks)):
        suites.append(_suite(report, group, index))
    ET.indent(suites, " ")
    return ET.tostring(suites, encoding="unicode", xml_declaration=False).join(
        ('<?xml version="1.0" encoding="utf-8"?>\n', "\n")
    )


def _suite(report: Report, group: wording.Group, index: int) -> ET.Element:
    counts = group.counts
    suite = ET.Element(
        "testsuite",
        {
            "id": str(index),
            "package": "trueline.verify",
            "name": _token(group.name),
            "hostname": NO_HOST,
            "timestamp": _timestamp(report.started),
            "tests": str(len(group.checks)),
            "failures": str(counts[Status.FAILED]),
            "errors": str(counts[Status.ERROR]),
            "skipped": str(counts[Status.NOT_COVERED]),
            "time": f"{group.seconds:.3f}",
        },
    )
    properties = ET.SubElement(suite, "properties")
    for name, value in [*wording.run_facts(report), *(("plan", each) for each in report.plan)]:
        ET.SubElement(properties, "property", {"name": name, "value": wording.clean(value)})
    suite.extend(_case(check) for check in group.checks)
    ET.SubElement(suite, "system-out").text = "\n".join(map(_measures, group.checks))
    ET.SubElement(suite, "system-err")
    return suite


def _case(check: Check) -> ET.Element:
    case = ET.Element(
        "testcase",
        {
            "classname": f"trueline.verify.{_token(check.group)}",
            "name": _token(wording.short_id(check)),
            "time": f"{check.seconds:.3f}",
        },
    )
    tag = {
        Status.FAILED: "failure",
        Status.ERROR: "error",
        Status.NOT_COVERED: "skipped",
    }.get(check.status)
    if tag is not None:
        outcome = ET.SubElement(case, tag, {"message": _message(check)})
        if tag != "skipped":  # Ant's schema has no type there
            outcome.set("type", str(check.status))
        outcome.text = "\n".join(_details(check))
    return case


def _message(check: Check) -> str:
    return wording.finding(check.place, check.evidence) or str(check.status)


def _details(check: Check) -> list[str]:
    lines = [wording.clean(check.what), wording.clean(check.evidence), _measures(check)]
    if check.replay:
        lines.append(f"replay: {wording.replay_command(check.replay)}")
    return [each for each in lines if each]


def _measures(check: Check) -> str:
    lines = [f"{wording.clean(check.id)}: {check.status}"]
    for measure in check.measures:
        at = wording.where(measure.place)
        value = f"{wording.clean(measure.name)} {wording.measured(measure)}"
        lines.append(f"  {value} at {at}" if at else f"  {value}")
    lines += [f"  unusual: {wording.clean(each)}" for each in check.unusual]
    return "\n".join(lines)


def _token(text: str) -> str:
    return " ".join(wording.clean(text).split()) or "checks"


def _timestamp(started: str) -> str:
    """Without the time zone, which Ant's schema does not allow: it is UTC."""
    found = re.match(r"\d{4}-\d{2}-\d{2}T\d{2}:\d{2}:\d{2}", started)
    return found[0] if found else "1970-01-01T00:00:00"
