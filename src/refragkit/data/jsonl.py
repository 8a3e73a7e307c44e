"""JSON Lines, read strictly: every problem is reported with its file and line, a few at once.

Harmless habits of editors are accepted: a UTF-8 byte order mark, CRLF line ends, blank lines at the end.
Everything else that is not one JSON object a line is refused.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from refragkit.errors import DataError

T = TypeVar("T")

MAX_REPORTED_LINES = 5
_SHOWN_CHARACTERS = 60
_TYPE_NAMES: dict[type, str] = {
    str: "a string",
    bool: "a boolean",
    int: "an integer",
    float: "a number",
    list: "a list",
    dict: "an object",
    type(None): "null",
}
_REQUIRED: Any = object()


class LineError(Exception):
    """What is wrong with one line; collected by `read_jsonl`, never seen by a user on its own."""


def describe(value: object) -> str:
    """A value of a JSON file as an error message shows it: its type and, shortened, itself."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    if len(text) > _SHOWN_CHARACTERS:
        text = text[:_SHOWN_CHARACTERS] + "..."
    return f"{_TYPE_NAMES.get(type(value), type(value).__name__)}: {text}"


class Record:
    """One JSON object of a file, read key by key with the types that are expected.

    Every getter raises `LineError` with the key, what was expected and what was got.
    """

    def __init__(self, fields: Mapping[str, Any], where: str = "") -> None:
        self.fields = fields
        self.where = where
        self._read: set[str] = set()

    def _get(self, key: str, default: Any) -> Any:
        self._read.add(key)
        if key in self.fields:
            return self.fields[key]
        if default is _REQUIRED:
            found = ", ".join(sorted(map(str, self.fields))) or "none"
            raise LineError(f"missing key '{self.where}{key}' (keys found: {found})")
        return default

    def _wrong(self, key: str, expected: str, value: object) -> NoReturn:
        raise LineError(f"key '{self.where}{key}': expected {expected}, got {describe(value)}")

    def string(self, key: str, *, default: Any = _REQUIRED, may_be_empty: bool = False) -> str:
        """A string; without ``may_be_empty`` one with more than white space."""
        value = self._get(key, default)
        if not isinstance(value, str):
            self._wrong(key, "a string", value)
        if not may_be_empty and not value.strip():
            self._wrong(key, "a string that is not empty", value)
        if not value.isascii():
            _check_unicode(value, f"{self.where}{key}")
        return value

    def identifier(self, key: str, *, default: Any = _REQUIRED) -> str:
        """A string that is not empty, or an integer, which becomes one."""
        value = self.fields.get(key)
        if isinstance(value, int) and not isinstance(value, bool):
            self._read.add(key)
            return str(value)
        return self.string(key, default=default)

    def strings(self, key: str, *, default: Any = _REQUIRED, may_be_empty: bool = False) -> tuple[str, ...]:
        """A list of strings that are not empty; without ``may_be_empty`` at least one of them."""
        values = self._get(key, default)
        if not isinstance(values, list | tuple):
            self._wrong(key, "a list of strings", values)
        for value in values:
            if not isinstance(value, str) or not value.strip():
                self._wrong(key, "strings that are not empty in the list", value)
            if not value.isascii():
                _check_unicode(value, f"{self.where}{key}")
        if not values and not may_be_empty:
            self._wrong(key, "a list with at least one string", list(values))
        return tuple(values)

    def integer(self, key: str, *, default: Any = _REQUIRED, minimum: int = 0) -> int:
        """An integer of at least ``minimum``; a boolean is not one."""
        value = self._get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
            self._wrong(key, f"an integer of at least {minimum}", value)
        return value

    def number(self, key: str, *, default: Any = _REQUIRED) -> float:
        """A finite number; a boolean is not one."""
        value = self._get(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
            self._wrong(key, "a finite number", value)
        return float(value)

    def objects(self, key: str, *, default: Any = _REQUIRED) -> list[Record]:
        """A list of JSON objects, as records whose messages name the position in the list."""
        values = self._get(key, default)
        if not isinstance(values, list | tuple):
            self._wrong(key, "a list of objects", values)
        for value in values:
            if not isinstance(value, dict):
                self._wrong(key, "objects in the list", value)
        return [Record(value, f"{self.where}{key}[{i}].") for i, value in enumerate(values)]

    def rest(self) -> dict[str, Any]:
        """The keys that no getter has asked for."""
        return {key: value for key, value in self.fields.items() if key not in self._read}


def _check_unicode(value: str, key: str) -> None:
    # JSON can spell half a surrogate pair ("\ud83d"); no tokenizer can encode that.
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise LineError(
            f"key '{key}': expected valid Unicode, got a lone surrogate at character {error.start}"
        ) from None


def _refuse_constant(name: str) -> NoReturn:
    raise LineError(f"expected JSON, got the constant {name} (not allowed by JSON)")


def _parse_line(line: bytes) -> Record:
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise LineError(
            f"expected UTF-8, got byte 0x{line[error.start]:02x} at byte {error.start + 1} of the line"
            " (save the file as UTF-8)"
        ) from None
    if not text.strip():
        raise LineError("expected a JSON object, got an empty line")
    try:
        # Without the line break, so that a missing brace is reported at the end of this line
        value = json.loads(text.rstrip(), parse_constant=_refuse_constant)
    except json.JSONDecodeError as error:
        shown = text.strip()
        shown = shown if len(shown) <= _SHOWN_CHARACTERS else shown[:_SHOWN_CHARACTERS] + "..."
        raise LineError(
            f"expected one JSON object, got broken JSON ({error.msg}, column {error.colno}): {shown}"
        ) from None
    except (ValueError, RecursionError) as error:
        raise LineError(f"expected one JSON object, got JSON that can't be read ({error})") from None
    if not isinstance(value, dict):
        raise LineError(f"expected a JSON object, got {describe(value)}")
    return Record(value)


def existing_file(path: str | Path, what: str) -> Path:
    """``path`` as a `Path`, checked to be a file.

    Raises:
        DataError: it is missing or is a folder.
    """
    file = Path(path).expanduser()
    if file.is_dir():
        raise DataError(f"{file}: expected {what} (a file), got a folder")
    if not file.is_file():
        raise DataError(f"{file}: expected {what}, but there is no such file")
    return file


def scan_jsonl(file: Path) -> Iterator[tuple[int, Record | LineError]]:
    """The lines of a file with their numbers: a record each, or what is wrong with the line.

    Blank lines at the end are passed over, others are reported once something follows them.

    Raises:
        OSError: the file can't be read.
    """
    with file.open("rb") as lines:
        yield from scan_lines(lines)


def scan_lines(lines: Iterable[bytes], first: int = 1) -> Iterator[tuple[int, Record | LineError]]:
    """`scan_jsonl` of lines as they stand in a file, the first of which is line ``first`` there."""
    blank: list[int] = []
    for number, raw in enumerate(lines, start=first):
        line = raw.removeprefix(b"\xef\xbb\xbf") if number == 1 else raw
        if not line.strip():
            blank.append(number)
            continue
        for gap in blank:
            yield gap, LineError("expected a JSON object, got an empty line")
        blank.clear()
        try:
            record = _parse_line(line)
        except LineError as problem:
            yield number, problem
        else:
            yield number, record


def bad_lines(file: Path, problems: Sequence[str], n_problems: int) -> str:
    """One message for the bad lines of a file.

    Args:
        file: the file.
        problems: the first of them, each with its place.
        n_problems: how many there are in all.
    """
    if n_problems == 1:
        return problems[0]
    more = n_problems - len(problems)
    tail = f"\n  ... and {more} more" if more else ""
    return "\n  ".join([f"{n_problems} bad lines in {file}:", *problems]) + tail


def read_jsonl(path: str | Path, what: str, parse: Callable[[Record], tuple[str, T]]) -> list[T]:
    """Read a JSON Lines file whose records have unique ids.

    Args:
        path: the file.
        what: what the file holds, for messages ("questions", "passages").
        parse: turns a record into (unique id, value); raises `LineError` for a bad one.

    Raises:
        DataError: the file is missing, empty, or has bad lines or repeated ids; the message lists up to
            `MAX_REPORTED_LINES` of them as ``file:line: problem`` and says how many there are in all.
    """
    file = existing_file(path, f"a JSONL file of {what}")
    values: list[T] = []
    first_line: dict[str, int] = {}
    problems: list[str] = []
    n_problems = 0

    def report(number: int, problem: str) -> None:
        nonlocal n_problems
        n_problems += 1
        if len(problems) < MAX_REPORTED_LINES:
            problems.append(f"{file}:{number}: {problem}")

    try:
        for number, record in scan_jsonl(file):
            if isinstance(record, LineError):
                report(number, str(record))
                continue
            try:
                key, value = parse(record)
            except LineError as problem:
                report(number, str(problem))
                continue
            if key in first_line:
                report(
                    number, f"key 'id': {key!r} is already used on line {first_line[key]}; ids must be unique"
                )
                continue
            first_line[key] = number
            values.append(value)
    except OSError as error:
        raise DataError(f"{file}: can't be read ({error.strerror or error})") from error

    if n_problems:
        raise DataError(bad_lines(file, problems, n_problems))
    if not values:
        raise DataError(f"{file}: expected {what}, one JSON object a line, but the file is empty")
    return values


def append_jsonl(path: Path, records: Sequence[Mapping[str, Any]]) -> None:
    """Append records, one JSON object a line."""
    with path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
