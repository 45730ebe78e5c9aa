"""Text that every machine with Python has: that of the standard library and the installed packages.

English comes first: documentation files and package descriptions, then docstrings, then source code up to the requested
size. A paragraph is kept where it first occurs. Documents are in a pseudo-random order that depends on their names
alone, so that the held-out end of the text is like the rest. Near copies, such as functions that differ in a name,
remain in both parts: the held-out loss is lower than on new text.
"""

from __future__ import annotations

import hashlib
import inspect
import os
import re
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from common.text import python_reference

KINDS = ("documentation", "docstrings", "source")
SKIPPED_FOLDERS = {"__pycache__", "test", "tests", "site-packages", "dist-packages"}  # packages are roots themselves
LISTS = {"top_level.txt", "entry_points.txt", "SOURCES.txt", "requires.txt", "dependency_links.txt", "CMakeLists.txt"}
MOST_IN_A_FILE = 2_000_000  # bytes; larger ones are data

# Comments and strings of a Python file; only triple-quoted strings are named. Quotes inside the others begin nothing.
STRINGS = re.compile(
    r"""\#[^\n]*
      | (?P<quotes>\"{3}|'{3}) (?P<body>(?:\\.|(?!(?P=quotes))[^\\])*) (?P=quotes)
      | "(?:\\.|[^"\\\n])*" | '(?:\\.|[^'\\\n])*'""",
    re.DOTALL | re.VERBOSE,
)


def installed_text(most: int) -> tuple[bytes, dict[str, int]]:
    """Return at most `most` bytes of text, and the bytes of each kind."""
    seen: set[bytes] = set()
    sizes = dict.fromkeys(KINDS, 0)
    chosen: list[tuple[bytes, bytes]] = []
    for kind, name, text in documents():
        left, document = most - sum(sizes.values()), new_paragraphs(text, seen)
        if len(document) > left:
            document = document[: max(0, document.rfind(b"\n\n", 0, left))]
        if document:
            chosen.append((_order(f"{kind} {name}"), document))
            sizes[kind] += len(document) + 2
        if sum(sizes.values()) >= most - 1000:  # what is left is too little to look for
            break
    return b"\n\n".join(document for _, document in sorted(chosen)), sizes


def documents() -> Iterator[tuple[str, str, str]]:
    """Yield (kind, name, text), the most English kind first."""
    code, prose = find_files()
    yield "documentation", "pydoc topics", python_reference().decode()
    for name, path in prose:
        text = read(path)
        if path.name == "METADATA":  # a header, then the description
            text = text.partition("\n\n")[2]
        if is_prose(text):
            yield "documentation", name, text
    for kind, part in (("docstrings", 0), ("source", 1)):
        for name, path in code:
            yield kind, name, split_source(read(path))[part]


def find_files() -> tuple[list[tuple[str, Path]], list[tuple[str, Path]]]:
    """Return (name, path) of Python files and of documentation, each in the order of documents."""
    code, prose = {}, {}
    for root in dict.fromkeys(Path(sysconfig.get_path(n)) for n in ("stdlib", "purelib", "platlib")):
        for folder, folders, files in os.walk(root):
            folders[:] = [f for f in folders if f not in SKIPPED_FOLDERS]
            for file in files:
                path = Path(folder, file)
                if path.suffix == ".py" and path.parent.name != "pydoc_data":  # those are the topics
                    code[str(path.relative_to(root))] = path
                elif (path.suffix in (".rst", ".md", ".txt") and file not in LISTS) or file == "METADATA":
                    prose[str(path.relative_to(root))] = path
    by_order = [sorted(found.items(), key=lambda item: _order(item[0])) for found in (code, prose)]
    return by_order[0], by_order[1]


def read(path: Path) -> str:
    """Return the text of a file, "" if it is data or has another encoding than UTF-8."""
    try:
        if path.stat().st_size > MOST_IN_A_FILE:
            return ""
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return ""
    return "" if "\0" in text else text


def is_prose(text: str) -> bool:
    """True if the text is mostly ASCII letters and white space, unlike tables of numbers and most other languages."""
    return bool(text) and len(re.findall(r"[A-Za-z\s]", text)) >= 0.75 * len(text)


def split_source(source: str) -> tuple[str, str]:
    """Split off the triple-quoted strings that begin a line, mostly docstrings; return them and the rest."""
    strings, rest, end = [], [], 0
    for found in STRINGS.finditer(source):
        if found["body"] is not None:
            line = source.rfind("\n", 0, found.start()) + 1
            if not source[line : found.start()].strip(" \trRuU"):
                strings.append(inspect.cleandoc(found["body"]))
                rest.append(source[end:line])
                end = found.end()
    return "\n\n".join(strings), "".join(rest) + source[end:]


def new_paragraphs(text: str, seen: set[bytes]) -> bytes:
    """Return the paragraphs of `text` that are not in `seen` up to white space, and add them to it."""
    kept = []
    for paragraph in re.split(r"\n\s*\n", text):
        words = " ".join(paragraph.split())
        key = hashlib.blake2b(words.encode(), digest_size=12).digest()
        if words and key not in seen:
            seen.add(key)
            kept.append(paragraph.strip("\n").rstrip())
    return "\n\n".join(kept).encode()


def _order(name: str) -> bytes:
    return hashlib.blake2b(name.encode(), digest_size=12).digest()
