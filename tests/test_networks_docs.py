"""The networks' page says nothing that does not run."""

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "networks.md").read_text()


def test_the_code_on_the_page_runs(capsys):
    names = {}
    for block in re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL):
        exec(compile(block, "docs/networks.md", "exec"), names)
    table = capsys.readouterr().out.splitlines()
    assert table[0].split() == ["module", "kind", "sizes", "parameters"]
    # GRU: 3 gates of (24 + 32) weights and a bias each per unit.
    assert re.search(r"memory +GRU +24 -> 32 +5,472", "\n".join(table))


def test_every_link_leads_somewhere():
    links = re.findall(r"\]\((?!https?:)([^)#]+)\)", PAGE)
    assert links
    assert [link for link in links if not (ROOT / "docs" / link).exists()] == []


def test_every_module_of_the_table_exists():
    import importlib

    rows = re.findall(r"^\| (`[^|]+) \|", PAGE, flags=re.MULTILINE)
    named = [re.findall(r"`(?:(\w+)\.)?(\w+)`", row) for row in rows if "." in row]
    assert len(named) >= 14
    for row in named:
        module = ""
        for prefix, kind in row:
            module = prefix or module
            assert hasattr(importlib.import_module(f"nnx_ppo.networks.{module}"), kind)
