"""From text to a dict: JSON, and the parts of HJSON that DeepSpeed's users write.

Text that strict JSON refuses is read only if it has one possible meaning, and is then logged; all
other text is an error with the line and the character in words.
"""

from __future__ import annotations

import base64
import json
import logging
import re
import unicodedata
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import hjson

from zero_contract.decoding import shown_of
from zero_contract.errors import ConfigError

_log = logging.getLogger(__name__)

_STRING = r'"(?:\\.|[^"\\\n])*"' + r"|'''.*?'''|'(?:\\.|[^'\\\n])*'"
_COMMENT = r"(?<![^\s,{}\[\]])(?:#[^\n]*|//[^\n]*|/\*.*?\*/)"
_TOKEN = re.compile(f"(?P<string>{_STRING})|{_COMMENT}", re.DOTALL)
_MASK = "\1"
"""Replaces every character of a string in an outline."""
_LAST_COMMA = re.compile(r",(?=\s*[}\]])")
_NO_COMMA = re.compile(r"(?:[}\]\1\d]|true|false|null)[ \t]+(?=[{\[\1]|-?\d)")
_COMMA, _UNCLOSED = "Expecting ',' delimiter", "Unterminated string starting at"
"""Two of the messages of Python's json."""
_PROBLEMS = {
    _COMMA: "a comma is missing before {}",
    "Expecting ':' delimiter": "a colon is missing before {}",
    "Expecting value": "there must be a value, and there is {}",
    "Expecting property name enclosed in double quotes": (
        "there must be a name in double quotes, and there is {}"
    ),
    "Invalid control character at": "a line break or a tab is within quotes",
    _UNCLOSED: "the quotes are not closed that open with {}",
    "Extra data": "nothing may follow the last bracket, and there is {}",
}
"""Message of Python's json -> the problem in words; {} is the text at its place."""
_SHOWN = 20
"""The number of characters of that text."""


def read_json(source: str | Path) -> Mapping[str, Any]:
    """Read the JSON or HJSON object in a string, in base64 or a file; keys must not repeat.

    Raises:
        ConfigError: The text cannot be read; names the line and the problem there.
    """
    text, name = str(source), "the config"
    if not text.lstrip().startswith("{"):
        try:
            # URL-safe, as DeepSpeed's launcher passes a config.
            decoded = base64.b64decode(text, altchars=b"-_", validate=True).decode()
        except ValueError:
            decoded = ""
        if decoded.lstrip().startswith("{"):
            text = decoded
        else:
            name = f"config {shown_of(text)}"
            try:
                text = Path(source).read_text(encoding="utf-8-sig")  # as some editors begin a file
            except UnicodeDecodeError as error:
                raise ConfigError(
                    f"config {str(source)!r} cannot be read: it is not UTF-8 text"
                ) from error
            except OSError as error:
                raise ConfigError(f"{name} cannot be read: {error.strerror}") from error
    if not text.strip():
        raise ConfigError(f"{name} is empty; write {{}} for a config without keys")
    try:
        data = json.loads(text, object_pairs_hook=_no_repeats)
    except json.JSONDecodeError:
        data = _from_hjson(text, name)
    if not isinstance(data, Mapping):
        raise ConfigError(f"{name} is a JSON {type(data).__name__}; it must be an object")
    return data


def _from_hjson(text: str, name: str) -> Any:
    """Read what strict JSON refuses: comments, superfluous commas, words without quotes."""
    outline = _TOKEN.sub(_blank, text)
    # Characters that look like one of JSON, or are invisible: HJSON would make them part of a word.
    for at, char in enumerate(outline):
        if char.isascii():
            continue
        instead = {"Zs": "type a plain space", "Cf": "delete it"}.get(unicodedata.category(char))
        if "QUOTATION MARK" in unicodedata.name(char, ""):
            instead = "type plain quotes"
        if instead is not None:
            odd = f"{unicodedata.name(text[at]).lower()} (U+{ord(text[at]):04X}), as in a web page"
            raise ConfigError(f"{name}: line {_line(text, at)}: {odd}; {instead}")
    commas = [match.start() for match in _LAST_COMMA.finditer(outline)]
    comments = [match.start() for match in _TOKEN.finditer(text) if not match["string"]]
    strict = _TOKEN.sub(lambda match: match[0] if match["string"] else _blank(match), text)
    for at in commas:
        strict = f"{strict[:at]} {strict[at + 1 :]}"
    lenient = {"comments": comments, "a comma after the last entry": commas}
    try:
        data = json.loads(strict, object_pairs_hook=_no_repeats)
    except json.JSONDecodeError as error:
        # HJSON would read `8 "bf16": ...`, after which a comma is missing, as one long string.
        gap = _NO_COMMA.search(outline)
        if gap and error.msg != _UNCLOSED:
            problem = error.msg if error.pos == gap.end() else _COMMA
            raise ConfigError(f"{name}: {_in_words(text, gap.end(), problem)}") from None
        try:
            data = hjson.loads(text, object_pairs_hook=_no_repeats)
        except hjson.HjsonDecodeError:
            problem = _in_words(text, error.pos, error.msg)
            raise ConfigError(f"{name} is not JSON: {problem}") from None
        lenient["no quotes, or a line break for a comma"] = [error.pos]
    found = [f"{what} (line {_line(text, at[0])})" for what, at in lenient.items() if at]
    _log.info("%s is read as DeepSpeed reads it, with %s", name, ", ".join(found))
    return data


def _blank(match: re.Match[str]) -> str:
    # Of the same length, with the same line breaks: places and lines stay those of the text.
    return re.sub(r"[^\n]", _MASK if match["string"] else " ", match[0])


def _in_words(text: str, at: int, problem: str) -> str:
    """The line and the problem at a place of the text."""
    there = text[at:].partition("\n")[0][:_SHOWN].rstrip()
    if not text[at:].strip():
        return f"line {_line(text, at)}: it ends here, and a bracket is still open"
    described = _PROBLEMS.get(problem, f"{problem} {{}}").format(there)
    return f"line {_line(text, at)}: {described}"


def _line(text: str, at: int) -> int:
    return text.count("\n", 0, at) + 1


def _no_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = [key for key, _ in pairs]
    repeated = sorted({key for key in names if names.count(key) > 1})
    if repeated:
        raise ConfigError(f"the config has the key {repeated[0]!r} more than once")
    return dict(pairs)
