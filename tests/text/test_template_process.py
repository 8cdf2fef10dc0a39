"""Templates that want everything: what they take is bounded, and the next one is served."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from trueline.errors import UsageError
from trueline.text import template_process
from trueline.text.template_process import MEMORY_BYTES, TemplateProcess
from trueline.text.templates import render_template

VALUES: dict[str, Any] = {"messages": [{"role": "user", "content": "hé\n\u2028🙂"}], "x": 1.5}
GREEDY = {
    "string": "{{ 'a' * 10**9 }}",
    "string of a variable": "{{ messages[0].role * 10**9 }}",
    "list": "{{ ([0] * 10**9) | length }}",
    "tuple": "{{ ((0,) * 10**9) | length }}",
    "power": "{{ (10 ** (10 ** 9)) % 7 }}",
    "doubled": "{% set ns = namespace(s='ab') %}{% for _ in range(60) %}"
    "{% set ns.s = ns.s ~ ns.s %}{% endfor %}{{ ns.s | length }}",
    "joined": "{{ (range(99999) | list * 9999) | join('abcdef') }}",
    "centred": "{{ 'a' | center(10**10) }}",
    "indented": "{{ ('a\n' * 10000) | indent(10**7) }}",
    "formatted": "{{ '%010000000000d' % 1 }}",
    "formatted by name": "{{ '{:>9999999999}'.format('a') }}",
    "justified": "{{ 'a'.ljust(10**10) }}",
    "replaced": "{{ ('a' * 10**5).replace('a', 'b' * 10**5) }}",
    "tabs": "{{ ('\t' * 10**4).expandtabs(10**7) }}",
    "json": "{{ [messages] | tojson(indent=10**10) }}",
    "batched": "{{ [1] | batch(10**9, 0) | list | length }}",
    "loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "output": "{% for a in range(99999) %}{{ 'abcdefgh' * 10000 }}{% endfor %}",
    "sorted": "{{ (range(99999) | list * 500) | sort | length }}",
}
SPENT = ("power", "loops")
"""All the time there is: no more than what the kernel rounds up to."""


@pytest.fixture
def process() -> Iterator[TemplateProcess]:
    made = TemplateProcess(cpu_seconds=1)
    yield made
    made.close()


def pid(process: TemplateProcess) -> int:
    assert process._process is not None
    return process._process.pid


def test_as_in_this_process(process: TemplateProcess) -> None:
    template = "{{ messages[0].content }}|{{ x }}|{{ messages | tojson }}"
    assert process.render(template, VALUES) == render_template(template, VALUES)
    first = pid(process)
    for broken in (
        "{{ 1 // 0 }}",
        "{% if %}",
        "{{ raise_exception('no') }}",
        "{{ ''.__class__.a }}",
    ):
        with pytest.raises(UsageError) as here:
            render_template(broken, VALUES)
        with pytest.raises(UsageError) as there:
            process.render(broken, VALUES)
        assert str(there.value) == str(here.value)
    assert pid(process) == first, "who only fails goes on"


@pytest.mark.parametrize("name", GREEDY)
def test_greed_is_refused(process: TemplateProcess, name: str) -> None:
    if name in SPENT:
        process.cpu_seconds = 0
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with pytest.raises(UsageError, match="chat template"):
        process.render(GREEDY[name], VALUES)
    assert process.render("{{ x }}", VALUES) == "1.5", "the next one is served"
    process.close()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    # the limit, the second that the kernel rounds up to, and two starts of Python
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 10


def test_the_kernel_bounds_its_memory(process: TemplateProcess) -> None:
    process.render("", VALUES)
    limits = Path(f"/proc/{pid(process)}/limits").read_text()
    (line,) = (line for line in limits.splitlines() if line.startswith("Max address space"))
    most, used = line.split()[3], Path(f"/proc/{pid(process)}/statm").read_text().split()[0]
    assert int(most) <= int(used) * resource.getpagesize() + MEMORY_BYTES


def test_long_texts_are_refused(process: TemplateProcess) -> None:
    longest = template_process.MOST_CHARACTERS
    assert len(process.render(f"{{{{ 'a' * {longest} }}}}", VALUES)) == longest
    with pytest.raises(UsageError, match=f"{longest + 1} characters; accepted: up to {longest}"):
        process.render(f"{{{{ 'a' * {longest + 1} }}}}", VALUES)


def test_one_that_died_is_replaced(process: TemplateProcess) -> None:
    process.render("", VALUES)
    os.kill(pid(process), 9)
    os.waitid(os.P_PID, pid(process), os.WEXITED | os.WNOWAIT)
    assert process.render("{{ x }}", VALUES) == "1.5"


def test_time_is_for_each_text(process: TemplateProcess) -> None:
    """Not for the process: many who take half of it are served."""
    some = "{% for a in range(99999) %}{{ a }}{% endfor %}"
    spent = 0.0
    while spent < process.cpu_seconds + 1.2:  # what the kernel rounds up to, and more
        assert process.render(some, VALUES).endswith("99998")
        stat = Path(f"/proc/{pid(process)}/stat").read_text().split()
        spent = (int(stat[13]) + int(stat[14])) / os.sysconf("SC_CLK_TCK")


def test_it_sees_no_keys(process: TemplateProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRUELINE_API_KEY", "secret")
    process.render("", VALUES)
    assert b"secret" not in Path(f"/proc/{pid(process)}/environ").read_bytes()
