"""A report as JUnit XML, held against what the schemas of Ant's and Jenkins's readers say."""

from __future__ import annotations

import re
from collections import Counter
from xml.etree import ElementTree as ET

import pytest

import reports
from trueline.verify.report import Report, Status
from trueline.verify.report.junit import junit_xml

TOKEN = r"\S+( \S+)*"
COUNT, SECONDS, ANY = r"\d+", r"\d{1,9}\.\d{3}", r"(?s).*"
ATTRIBUTES = {
    "testsuites": {},
    "testsuite": {
        "id": COUNT,
        "package": TOKEN,
        "name": TOKEN,
        "hostname": "localhost",
        "timestamp": r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d",
        "tests": COUNT,
        "failures": COUNT,
        "errors": COUNT,
        "skipped": COUNT,
        "time": SECONDS,
    },
    "properties": {},
    "property": {"name": TOKEN, "value": ANY},
    "testcase": {"classname": TOKEN, "name": TOKEN, "time": SECONDS},
    "failure": {"message": ANY, "type": TOKEN},
    "error": {"message": ANY, "type": TOKEN},
    "skipped": {"message": ANY},
    "system-out": {},
    "system-err": {},
}
"""Both schemas together: these and no others."""
CHILDREN = {
    "testsuites": "(testsuite )*",
    "testsuite": "properties (testcase )*system-out system-err ",
    "properties": "(property )*",
    "testcase": "(failure |error |skipped )?",
}


def valid(report: Report) -> ET.Element:
    root = ET.fromstring(junit_xml(report))
    assert root.tag == "testsuites"
    for element in root.iter():
        wanted = ATTRIBUTES[element.tag]
        assert element.keys() == list(wanted), element.tag
        for name, pattern in wanted.items():
            assert re.fullmatch(pattern, element.attrib[name]), (element.tag, name)
        children = "".join(f"{child.tag} " for child in element)
        assert re.fullmatch(CHILDREN.get(element.tag, ""), children), element.tag
    for suite in root:
        tags = Counter(child.tag for case in suite.iter("testcase") for child in case)
        found = {name: int(suite.attrib[name]) for name in ("failures", "errors", "skipped")}
        assert found == {
            "failures": tags["failure"],
            "errors": tags["error"],
            "skipped": tags["skipped"],
        }
        assert int(suite.attrib["tests"]) == len(list(suite.iter("testcase")))
    return root


@pytest.mark.parametrize("name", reports.ALL)
def test_it_is_valid(name: str) -> None:
    report = reports.ALL[name]()
    root = valid(report)
    assert len(list(root.iter("testcase"))) == len(report.checks)
    assert len(list(root.iter("failure"))) == report.counts()[Status.FAILED]


def case(root: ET.Element, name: str) -> ET.Element:
    return next(each for each in root.iter("testcase") if each.attrib["name"] == name)


def test_a_failure_says_where() -> None:
    root = valid(reports.failing())
    (failure,) = case(root, "mixed step")
    assert failure.tag == "failure"
    assert failure.attrib["message"].startswith("layer 3, mixer, attention=native, request 2")
    assert "\n" not in failure.attrib["message"]
    assert failure.text is not None
    for part in ("reference 0.2003", "accepted 3.2e-3", "replay: trueline replay 'verify-fail"):
        assert part in failure.text
    (error,) = case(root, "abort storm")
    assert (error.tag, error.attrib["type"]) == ("error", "error")
    assert case(root, "mixed step").attrib["classname"] == "trueline.verify.modes"


def test_not_covered_is_skipped_with_the_reason() -> None:
    (skipped,) = case(valid(reports.passing()), "captured")
    assert (skipped.tag, skipped.attrib["message"]) == ("skipped", reports.NO_GPU)
    assert len(case(valid(reports.passing()), "mixed step")) == 0


def test_model_environment_and_measures_are_in_it() -> None:
    root = valid(reports.passing())
    properties = {each.attrib["name"]: each.attrib["value"] for each in root.iter("property")}
    assert properties["model"].startswith("witness-v3: deepseek_v3, bfloat16")
    assert properties["software"] == "Python 3.12.4, PyTorch 2.11.0, Triton 3.6.0, Linux x86_64"
    assert {"fingerprint", "run", "options", "command", "plan"} <= properties.keys()
    out = "".join(each.text or "" for each in root.iter("system-out"))
    assert "relative error 1.46e-3 (band 1.2e-3, accepted 5.8e-3)" in out


def test_texts_arrive_whole() -> None:
    root = valid(reports.hostile())
    shown = "</script><b>&\"'\\x1b[31m\\x00\\u202e[bold]{{7*7}}]]>\\ud800"
    assert all(each.text is not None and shown in each.text for each in root.iter("failure"))
