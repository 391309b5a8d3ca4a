"""What of torch's own suite is left out, and why: the list in ``left_out.txt``.

A form is a backend and a number of ranks, ``mesh 3``. The file has a line for each reason, with the
forms that it holds in where not in all, and the names of the tests below it. ``python -m
tests.conformance --list`` writes it anew, from a run of all forms.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

__all__ = ["FORMS", "read", "write"]

FORMS = ("mesh 3", "mesh 4", "gloo 3")
"""The backend by its own name, and in the place of gloo, where more tests let it in."""

_FILE = Path(__file__).with_name("left_out.txt")


def read() -> dict[str, dict[str, str]]:
    """Return, for each form, why each test that is left out is."""
    found: dict[str, dict[str, str]] = {form: {} for form in FORMS}
    forms: list[str] = []
    reason = ""
    for line in _FILE.read_text().splitlines():
        if line.startswith("    "):
            for form in forms:
                found[form][line.strip()] = reason
        elif line:
            reason, _, named = line.partition(" @ ")
            forms = named.split(", ") if named else list(FORMS)
    return found


def write(reasons: Mapping[str, Mapping[str, str]]) -> None:
    """Write the file; `reasons` as `read` returns them."""
    groups: defaultdict[str, list[str]] = defaultdict(list)
    for name in sorted({name for names in reasons.values() for name in names}):
        whys = {form: reasons[form][name] for form in FORMS if name in reasons[form]}
        for why in sorted(set(whys.values())):
            forms = [form for form in FORMS if whys.get(form) == why]
            groups[why if len(forms) == len(FORMS) else f"{why} @ {', '.join(forms)}"].append(name)
    sections = (
        "\n".join((why, *(f"    {name}" for name in groups[why]))) for why in sorted(groups)
    )
    _FILE.write_text("\n\n".join(sections) + "\n")
