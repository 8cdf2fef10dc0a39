"""What the documentation says is what the code does."""

from __future__ import annotations

import importlib.util
import re

from paths import ROOT
from trueline.models import FAMILIES, OVERRIDES, REGISTRY
from trueline.models.harmless import HARMLESS
from trueline.ops.registry import FUNCTIONS
from trueline.plan.select import KINDS
from trueline.plugins import API_VERSION
from trueline.tiny.configs import FAMILIES as TINY_FAMILIES
from trueline.verify.checks import CHECKS
from trueline.verify.faults.table import FAULTS

README = (ROOT / "README.md").read_text()


def test_faults_page_is_current() -> None:
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    generate = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generate)
    assert (ROOT / "docs" / "faults.md").read_text() == generate.faults_page(), "run make docs"


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


def test_the_contracts_are_listed() -> None:
    page = (ROOT / "docs" / "plugins.md").read_text()
    assert f"`api_version = {API_VERSION}`" in page
    for op, functions in FUNCTIONS.items():
        assert f"| `{op}` | {', '.join(f'`{name}`' for name in functions)} |" in page
    for spec, kind in KINDS.items():
        assert f"| `{kind}` | `{spec.__name__}` |" in page
    for kind in REGISTRY.needs:
        assert f'"{kind}.' in page


def test_links_lead_somewhere() -> None:
    own = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md"))
    for page in (*own, *(ROOT / "examples").rglob("*.md")):
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
