"""/docs: the OpenAPI document as a page to read. No script, and nothing from elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from trueline.utils.json_types import JSON

POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
STYLE = """
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 60rem; padding: 0 1rem; }
code, .method { font-family: ui-monospace, monospace; }
.method { background: #8883; border-radius: 4px; padding: 0 .4em; }
summary { cursor: pointer; padding: .3rem 0; }
table { border-collapse: collapse; width: 100%; }
td { border-top: 1px solid #8884; padding: .3rem .6rem .3rem 0; vertical-align: top; }
"""


def docs_page(document: JSON) -> str:
    title = f"{document['info']['title']} {document['info']['version']}"
    routes = "".join(
        _route(path, method, operation, document["components"]["schemas"])
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    )
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width">'
        f"<title>{escape(title)}: API</title><style>{STYLE}</style><h1>{escape(title)}: API</h1>"
        '<p>For programs: <a href="openapi.json">openapi.json</a>. A field that is not listed is '
        f"refused with a 400 that names it.</p>{routes}</html>"
    )


def _route(path: str, method: str, operation: JSON, schemas: JSON) -> str:
    key = " · needs an API key" if operation.get("security") else ""
    parts = [
        f'<details><summary><span class="method">{escape(method.upper())}</span> '
        f"<code>{escape(path)}</code> {escape(operation['summary'])}{key}</summary>"
    ]
    body = operation.get("requestBody")
    if body is not None:
        names = _names(body["content"]["application/json"]["schema"])
        parts.extend(_table(name, schemas[name]) for name in names)
    answers = ", ".join(
        f"{escape(status)} {escape(answer['description'])}"
        for status, answer in operation["responses"].items()
    )
    return "".join([*parts, f"<p>{answers}</p></details>"])


def _names(schema: JSON) -> Iterator[str]:
    for each in schema.get("anyOf", [schema]):
        yield each["$ref"].rpartition("/")[2]


def _table(name: str, schema: JSON) -> str:
    needed = schema.get("required", ())
    rows = "".join(
        f"<tr><td><code>{escape(field)}</code>{' (needed)' if field in needed else ''}</td>"
        f"<td>{escape(str(about.get('description', '')))}</td></tr>"
        for field, about in sorted(schema["properties"].items(), key=lambda p: p[0] not in needed)
    )
    return f"<h2>{escape(name)}</h2><table>{rows}</table>"
