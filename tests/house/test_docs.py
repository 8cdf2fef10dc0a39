"""What the documentation says is what the code does."""

from __future__ import annotations

import re
from pathlib import Path

import api
import generate
import picture
import trueline
from paths import DOCS, ROOT
from trueline.engine.params import SamplingParams
from trueline.models import FAMILIES, OVERRIDES, REGISTRY
from trueline.models.harmless import HARMLESS
from trueline.ops.registry import FUNCTIONS
from trueline.plan.select import LAYER_KINDS
from trueline.plugins import API_VERSION
from trueline.spec.feedforward import DenseSpec, MoESpec
from trueline.spec.mixer import LightningSpec, MLASpec
from trueline.tiny.configs import FAMILIES as TINY_FAMILIES
from trueline.verify.checks import CHECKS
from trueline.verify.faults.table import FAULTS

README = (ROOT / "README.md").read_text()


def test_generated_pages_are_current() -> None:
    for name, made in generate.PAGES.items():
        assert (DOCS / name).read_text() == made(), f"docs/{name} is not current: run make docs"


def test_the_reference_has_what_users_import() -> None:
    page = api.api_page()
    for name in trueline.__all__:
        assert f"## {name}\n" in page or name == "__version__"
    for field in SamplingParams.__struct_fields__:
        assert f"| `{field}` |" in page
    for op, functions in FUNCTIONS.items():
        assert f"## Op `{op}`\n" in page, functions


def test_the_picture_names_files_that_exist() -> None:
    for name in picture.named_files():
        assert (ROOT / "src" / "trueline" / name).exists(), name


def test_readme_names_every_family_and_figure() -> None:
    for family in FAMILIES:
        assert f"`{family}`" in README, family
    assert f"{len(FAULTS)} seeded faults" in README


def test_docs_name_what_exists() -> None:
    facts = (ROOT / "docs" / "facts.md").read_text()
    for name in OVERRIDES:
        assert name in facts
    for key in ("attention_dropout", "head_dim", "auto_map"):
        assert key in HARMLESS
    reference = (ROOT / "docs" / "reference.md").read_text()
    for check in CHECKS:
        assert f"**{check}**" in reference, check
    checkpoints = (ROOT / "docs" / "checkpoints.md").read_text()
    for family in TINY_FAMILIES:
        assert family in checkpoints, family


def test_reports_of_ranks_name_faults_and_their_checks() -> None:
    page = (ROOT / "docs" / "ranks.md").read_text()
    section = page.split("## Public reports", 1)[1].split("\n## ")[0]
    checks = {fault.id: fault.check for fault in FAULTS}
    rows = [line for line in section.splitlines() if line.startswith("|") and "`" in line]
    assert rows
    for row in rows:
        *_, faults, check, _ = (cell.strip() for cell in row.split("|"))
        for fault in re.findall("`([^`]+)`", faults):
            assert checks[fault] == check, fault


def test_the_contracts_are_listed() -> None:
    page = (ROOT / "docs" / "plugins.md").read_text()
    assert f"`api_version = {API_VERSION}`" in page
    for op, functions in FUNCTIONS.items():
        assert f"| `{op}` | {', '.join(f'`{name}`' for name in functions)} |" in page
    for spec in (MLASpec, LightningSpec, DenseSpec, MoESpec):
        assert spec.label in LAYER_KINDS
        assert f"| `{spec.label}` | `{spec.__name__}` |" in page
    for kind in REGISTRY.needs:
        assert f'"{kind}.' in page


def anchors(page: Path) -> set[str]:
    """Of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", each.lower()).replace(" ", "-") for each in headings}


def test_links_lead_somewhere() -> None:
    own = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *DOCS.rglob("*.md"))
    for page in (*own, *(ROOT / "examples").rglob("*.md")):
        for name, _, anchor in re.findall(r"\]\(([^)#]*)(#([^)]+))?\)", page.read_text()):
            target = page.parent / name if name else page
            assert target.exists(), f"{page.name} links to {name}"
            assert not anchor or anchor in anchors(target), f"{page.name}: {name}#{anchor}"
