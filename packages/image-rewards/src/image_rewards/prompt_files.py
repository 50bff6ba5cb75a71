"""Prompt files: JSON lines, a JSON list, plain text, CSV, TSV, Parquet, a data set on disk; one file, several, or a folder.

The README has the table of kinds and of fields. GenEval's own files are read as they are.
"""

from __future__ import annotations

import codecs
import contextlib
import csv
import difflib
import hashlib
import io
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .errors import PromptFileError, missing_extra, require

SUFFIXES = (".jsonl", ".ndjson", ".json", ".txt", ".csv", ".tsv", ".parquet")
PROMPT_NAMES = ("prompt", "caption", "text")
_MARKS = (  # the longer ones first: UTF-32's begins with UTF-16's
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
    (codecs.BOM_UTF8, "utf-8-sig"),
)
_PACKED = {
    b"\x1f\x8b": "gzip data",
    b"PK\x03\x04": "a zip archive or an Excel file",
    b"PAR1": "a Parquet file",
    b"ARROW1": "an Arrow file",
    b"\x28\xb5\x2f\xfd": "zstd data",
    b"\x89PNG": "a PNG picture",
    b"\xff\xd8\xff": "a JPEG picture",
    b"%PDF": "a PDF",
}
_NEGATIVE = ("negative", "neg_prompt", "neg", "uncond")  # what others call a negative prompt


@dataclass(frozen=True)
class PromptRow:
    """One prompt: its file, its number there (the line; in a JSON list or Parquet file the entry, from 1), and what it holds."""

    file: Path
    number: int
    prompt: str
    negative_prompt: str | None = None
    metadata: dict[str, Any] = field(default_factory=dict)
    unit: str = "line"

    @property
    def where(self) -> str:
        """Names the prompt in messages."""
        return f"{self.file}, {self.unit} {self.number}"


def _must(holds: bool, message: str) -> None:
    require(holds, message, PromptFileError)


def prompt_files(paths: str | Path | Sequence[str | Path]) -> list[Path]:
    """The files behind a path or a list of paths. A folder means its files of a known suffix, by name, without its subfolders.

    Raises:
        PromptFileError: a path that is not there, a folder without a prompt file, or a file named twice.
    """
    given = [paths] if isinstance(paths, str | Path) else list(paths)
    _must(bool(given) and "" not in given, "no prompt file is named; give a file, a folder or a list of them")
    files: list[Path] = []
    for path in map(Path, given):
        inside = [path]
        splits = path / "dataset_dict.json"
        if splits.is_file():
            names = ", ".join(sorted(one.name for one in path.iterdir() if (one / "state.json").is_file()))
            raise PromptFileError(f"{path} is a data set of several splits; name one: {path}/NAME, of {names}")
        if path.is_dir() and not (path / "state.json").is_file():
            inside = [f for f in path.iterdir() if f.is_file() and f.suffix.lower() in SUFFIXES and f.name[0] != "."]
            _must(bool(inside), f"the folder {str(path)!r} holds no prompt file ({', '.join(SUFFIXES)})")
        hint = "; several files are a list: [a.jsonl,b.jsonl]" if "," in str(path) else ""
        hint = "; download it first" if str(path).startswith(("http:/", "https:/")) else hint
        missing = f"there is no prompt file {str(path)!r}; give a file, a folder or a list of them{hint}"
        _must(path.is_dir() or path.is_file(), missing)
        files += sorted(inside)
    real = [file.resolve() for file in files]
    for file, name in zip(files, real, strict=True):
        _must(real.count(name) == 1, f"prompt file {str(file)!r} is named twice; its prompts would count double")
    return files


def read_prompts(paths: str | Path | Sequence[str | Path]) -> list[PromptRow]:
    """Every prompt of the files, in order. Equal texts stay separate prompts.

    Raises:
        PromptFileError: what `prompt_files` refuses, or a file that cannot be read or holds no prompt; the message names the file,
            the line and what is wrong.
    """
    return [row for file in prompt_files(paths) for row in _read(file)]


HELD_OUT_SHARE = 0.1
"""Of the texts, what validates when a training file comes without a validation file."""


def held_out(texts: Iterable[str], share: float = HELD_OUT_SHARE, most: int | None = None) -> set[str]:
    """The texts that validate: those with the smallest SHA-256, so the same ones whatever their order.

    Args:
        texts: of all prompts; equal ones count once and are wholly on one side.
        share: of the different texts, rounded down, but at least one text.
        most: no more than this many.

    Raises:
        PromptFileError: fewer than two different texts, or a share that leaves none to train on.
    """
    _must(0 < share < 1, f"a share of {share:g} leaves nothing on one side; give more than 0 and less than 1")
    order = sorted(set(texts), key=lambda text: hashlib.sha256(text.encode()).digest())
    _must(len(order) > 1, "holds one text, so none can be held out")
    count = max(math.floor(round(len(order) * share, 9)), 1)
    return set(order[: count if most is None else min(count, most)])


def _read(file: Path) -> list[PromptRow]:
    unit, found = _entries(file)
    rows = [_row(file, unit, number, value) for number, value in found]
    _must(bool(rows), f"prompt file {str(file)!r} holds no prompt; write one a line")
    return rows


def rows_and_problems(file: Path) -> tuple[list[PromptRow], list[str]]:
    """The prompts of a file that can be read, and what is wrong with every other line."""
    rows, wrong = list[PromptRow](), list[str]()
    try:
        unit, found = _entries(file)
        for number, value in found:
            try:
                rows.append(_row(file, unit, number, value))
            except PromptFileError as error:
                wrong.append(str(error))
    except PromptFileError as error:  # nothing after it can be read
        wrong.append(str(error))
    if not rows and not wrong:
        wrong.append(f"prompt file {str(file)!r} holds no prompt; write one a line")
    return rows, wrong


def _entries(file: Path) -> tuple[str, Iterable[tuple[int, Any]]]:
    """What an entry is called ("line", "row", "entry"), and each with its number."""
    kind = file.suffix.lower()
    if file.is_dir():
        return "row", _dataset(file)
    if kind == ".parquet":
        return "row", _parquet(file)
    text = text_of(file)
    start = text.lstrip()[:1]
    if kind in (".csv", ".tsv"):
        return "line", _table(file, text, kind)
    if start and start in "{[" and (kind != ".txt" or _is_json(text)):
        whole = None if kind in (".jsonl", ".ndjson") and start == "{" else _whole(text)
        if whole is not None:
            return "entry", enumerate(whole, 1)
        if start != "{":
            raise PromptFileError(f"{file}{_fault(text)}; a JSON file is a list of objects or of texts")
        return "line", _lines(file, text)
    unclear = f"{file}: it is not clear what a file named {file.name!r} holds; end its name with one of "
    _must(kind in SUFFIXES, unclear + ", ".join(SUFFIXES))
    return "line", _plain(text) if kind == ".txt" else _lines(file, text)


def text_of(file: Path) -> str:
    """A file's text: UTF-8, or what its byte-order mark says."""
    try:
        data = file.read_bytes()
    except OSError as error:
        raise PromptFileError(f"{file} cannot be read: {error}") from error
    pointer = data.startswith(b"version https://git-lfs")
    _must(not pointer, f"{file} is a git-LFS pointer, not the file itself; fetch it with `git lfs pull`")
    page = data.lstrip()[:14].lower().startswith((b"<!doctype html", b"<html"))
    _must(not page, f"{file} is an HTML page, not a prompt file; download the raw file")
    packed = next((name for magic, name in _PACKED.items() if data.startswith(magic)), None)
    _must(not packed, f"{file} is {packed}, not text; unpack or convert it into one of {', '.join(SUFFIXES)}")
    encoding = next((name for mark, name in _MARKS if data.startswith(mark)), "utf-8")
    try:
        text = data.decode(encoding)
    except UnicodeDecodeError as error:
        line = len(re.findall(rb"\r\n|\n|\r", data[: error.start])) + 1 if encoding.startswith("utf-8") else 0
        where = f"line {line}, byte {error.start}" if line else f"byte {error.start}"
        raise PromptFileError(
            f"{file}, {where}: 0x{data[error.start]:02x} is no {encoding.removesuffix('-sig').upper()}; "
            "save the file as UTF-8"
        ) from error
    if "\0" in text:
        line = len(lines_of(text[: text.index("\0")]))
        raise PromptFileError(
            f"{file}, line {line}: holds zero bytes (UTF-16 without its mark, or no text at all); save the file as UTF-8"
        )
    return text


def lines_of(text: str) -> list[str]:
    """Lines end at \\n, \\r\\n or \\r; U+2028, U+0085 and the like are letters of a prompt, which `splitlines` does not know."""
    return re.split(r"\r\n|\n|\r", text)


def _plain(text: str) -> Iterator[tuple[int, Any]]:
    return ((number, line.strip()) for number, line in enumerate(lines_of(text), 1) if line.strip())


def _is_json(text: str) -> bool:
    """Whether a .txt file is JSON after all: all of it, or its first line."""
    try:
        return _whole(text) is not None or isinstance(json.loads(lines_of(text.lstrip())[0]), dict)
    except (ValueError, RecursionError):
        return False


def _whole(text: str) -> list[Any] | None:
    """The entries of a text that is one JSON list, or one object that is a prompt; None when it is neither."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if isinstance(value, dict):
        return [value]
    return value if isinstance(value, list) and all(isinstance(v, str | dict) for v in value) else None


def _fault(text: str) -> str:
    """Where and why a text is no JSON, for a message that begins with the file's name."""
    try:
        return f" holds {json.loads(text)!r:.80}"
    except json.JSONDecodeError as error:
        return f", line {error.lineno} is not JSON ({error.msg} at column {error.colno})"
    except (ValueError, RecursionError) as error:
        return f" cannot be read: {error}"


def _lines(file: Path, text: str) -> Iterator[tuple[int, Any]]:
    """Each line's value, or the error that says why it has none."""
    for number, line in _plain(text):
        value: Any
        try:
            value = json.loads(line)
        except json.JSONDecodeError as error:
            said = f"{file}, line {number} is not JSON ({error.msg} at column {error.colno}): {line[:80]!r}"
            value = PromptFileError(said)
        except (ValueError, RecursionError) as error:
            value = PromptFileError(f"{file}, line {number} cannot be read: {error}")
        yield number, value


def _table(file: Path, text: str, kind: str) -> Iterator[tuple[int, Any]]:
    """Rows of a CSV or TSV. A .csv may be cut by semicolons or tabs, as some spreadsheets write it."""
    first = lines_of(text.lstrip("\r\n"))[0]
    cuts = "\t" if kind == ".tsv" else ",;\t"
    headers = {cut: [cell.strip() for cell in next(csv.reader([first], delimiter=cut), [])] for cut in cuts}
    cut = next((c for c in cuts if any(name.lower() in PROMPT_NAMES for name in headers[c])), cuts[0])
    names = [name.lower() if name.lower() in (*PROMPT_NAMES, "metadata") else name for name in headers[cut]]
    only = f"only {', '.join(map(repr, names))[:80]}; write a header line"
    _must(bool(set(names) & set(PROMPT_NAMES)), f"{file}, line 1 names no column {' or '.join(PROMPT_NAMES)}, {only}")
    for name in names:
        _must(not name or names.count(name) == 1, f"{file}, line 1 names the column {name!r} twice")
    rows = csv.reader(io.StringIO(text, newline=""), delimiter=cut, strict=True)
    number, head = 1, True
    try:
        for cells in rows:
            start, number = number, rows.line_num + 1
            if not any(cell.strip() for cell in cells):
                continue
            if head:
                head = False
                continue
            wrong = f"{file}, line {start} has {len(cells)} cells for {len(names)} columns"
            _must(len(cells) == len(names), f"{wrong}; put a prompt that holds {cut!r} in double quotes")
            named = zip([name or f"column {i}" for i, name in enumerate(names, 1)], cells, strict=True)
            yield start, {name: _cell(name, cell) for name, cell in named if cell.strip()}
    except csv.Error as error:
        raise PromptFileError(f"{file}, line {number} is no {kind[1:].upper()}: {error}") from error


def _cell(name: str, cell: str) -> Any:
    """A cell is text; outside the prompt's columns, a number, a JSON object or a JSON list is one."""
    if name not in (*PROMPT_NAMES, "negative_prompt") and re.match(r"\s*([{\[]|-?\d)", cell):
        with contextlib.suppress(ValueError, RecursionError):
            return json.loads(cell)
    return cell


def _arrow(what: str) -> Any:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise missing_extra("pyarrow", "parquet", what) from error
    return pyarrow


def _parquet(file: Path) -> Iterator[tuple[int, Any]]:
    pyarrow = _arrow(f"the Parquet file {str(file)!r}")
    try:
        rows = pyarrow.parquet.read_table(file).to_pylist()
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        raise PromptFileError(f"{file} is no readable Parquet file: {str(error).splitlines()[0]}") from error
    return enumerate(rows, 1)


def _dataset(folder: Path) -> Iterator[tuple[int, Any]]:
    """Rows of what `Dataset.save_to_disk` of Hugging Face's datasets wrote: Arrow streams, named in `state.json`."""
    pyarrow = _arrow(f"the data set {str(folder)!r}")
    rows: list[Any] = []
    try:
        state = json.loads((folder / "state.json").read_bytes())
        if state.get("_indices_files"):
            raise PromptFileError(f"{folder} holds a selection of rows beside them; write it with flatten_indices()")
        for entry in state["_data_files"]:
            file = folder / Path(entry["filename"]).name  # never a path out of the folder
            with pyarrow.memory_map(str(file)) as source:
                rows += pyarrow.ipc.open_stream(source).read_all().to_pylist()
    except PromptFileError:
        raise
    except (pyarrow.ArrowException, OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        said = str(error).splitlines() or [type(error).__name__]
        raise PromptFileError(f"{folder} is no readable data set: {said[0]}") from error
    return enumerate(rows, 1)


def _row(file: Path, unit: str, number: int, value: Any) -> PromptRow:
    if isinstance(value, PromptFileError):
        raise value
    where = f"{file}, {unit} {number}"
    given = {"prompt": value} if isinstance(value, str) else value
    given = without_nulls(given) if isinstance(given, Mapping) else {}
    name = next((n for n in PROMPT_NAMES if n in given), "prompt")
    text, negative = given.pop(name, None), given.pop("negative_prompt", None)
    _must(
        isinstance(text, str) and bool(text.strip()),
        f'{where} needs a non-empty text under "{name}", got {_short(value)}',
    )
    _must(isinstance(negative, str | None), f'{where}: "negative_prompt" must be a text, got {negative!r:.80}')
    metadata: Any = given.pop("metadata", {})
    if isinstance(metadata, str):
        with contextlib.suppress(ValueError, RecursionError):
            metadata = without_nulls(json.loads(metadata))
    _must(isinstance(metadata, dict), f'{where}: "metadata" must be an object, got {metadata!r:.80}')
    for key, other in given.items():
        known = str(key).lower()
        slip = known in _NEGATIVE or difflib.SequenceMatcher(None, known, "negative_prompt").ratio() > 0.85
        _must(not slip, f'{where}: the field {key!r} looks like "negative_prompt"; write it so')
        one = f"{where}: {key!r} stands both beside and in the metadata, with two values; keep one"
        _must(metadata.get(key, other) == other, one)
        metadata[str(key)] = other
    try:  # halves of a surrogate pair can be written in JSON, and no tokenizer takes them
        (text + (negative or "") + json.dumps(metadata, allow_nan=False, ensure_ascii=False)).encode("utf-8")
    except UnicodeEncodeError as error:
        raise PromptFileError(f"{where} holds half of a surrogate pair ({error.object[error.start]!r})") from error
    except (TypeError, ValueError) as error:
        column = next((name for name, one in metadata.items() if not _is_plain(one)), "metadata")
        raise PromptFileError(
            f"{where}, column {column!r}: metadata must be JSON ({error}); leave out columns that hold pictures or dates"
        ) from error
    return PromptRow(file, number, text, negative, metadata, unit)


def _is_plain(value: Any) -> bool:
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError):
        return False
    return True


def without_nulls(value: Any) -> Any:
    """`value` without the keys whose value is null (NaN too, as data frames write it), at every depth."""
    if isinstance(value, Mapping):
        return {k: without_nulls(v) for k, v in value.items() if v is not None and v == v}
    return [without_nulls(v) for v in value] if isinstance(value, list) else value


def _short(value: Any) -> str:
    return repr(json.dumps(value, ensure_ascii=False, default=str)[:80])
