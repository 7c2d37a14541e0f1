"""The text of PDF pages, with the values of their form fields."""

from __future__ import annotations

import io
from typing import Any

from cachecraft_rag.retrievers.reading.tables import FormatError


def pdf_pages(data: bytes) -> list[str]:
    """Return the text of each page of a PDF; the filled fields of a form are lines `label: value` at its end.

    Raises FormatError for a file that is locked with a password; other errors of pypdf for a damaged file pass.
    """
    from pypdf import PasswordType, PdfReader

    reader = PdfReader(io.BytesIO(data))
    if reader.is_encrypted and reader.decrypt("") == PasswordType.NOT_DECRYPTED:
        raise FormatError("is locked with a password; save a copy without one")
    return [_page_text(page) for page in reader.pages]


def _page_text(page: Any) -> str:
    fields = [
        annotation.get_object()
        for annotation in (page.get("/Annots") or ())
        if annotation.get_object().get("/Subtype") == "/Widget"
    ]
    if not fields:
        return str(page.extract_text())
    pieces: list[tuple[float, float, str]] = []  # x, y, text

    def note(text: str, matrix: list[float], text_matrix: list[float], *_font: object) -> None:
        if text.strip():
            x = text_matrix[4] * matrix[0] + text_matrix[5] * matrix[2] + matrix[4]
            y = text_matrix[4] * matrix[1] + text_matrix[5] * matrix[3] + matrix[5]
            pieces.append((x, y, " ".join(text.split())))

    text = page.extract_text(visitor_text=note)
    lines = [_field_line(field, pieces) for field in fields]
    return "\n".join([text, *filter(None, lines)])


def _field_line(field: Any, pieces: list[tuple[float, float, str]]) -> str:
    """Return a form field as `label: value`, or "" if it is empty."""
    kind = _inherited(field, "/FT")
    value = _inherited(field, "/V")
    left, bottom, right, top = (float(edge) for edge in field["/Rect"])
    beside = [
        (left - x if x < left else x - right, label)
        for x, y, label in pieces
        if bottom - 4 <= y <= top and (x < left or kind == "/Btn")
    ]
    name = _inherited(field, "/TU") or _inherited(field, "/T") or ""
    label = min(beside)[1] if beside else str(name)
    if kind == "/Btn":
        if int(_inherited(field, "/Ff") or 0) & (1 << 16):  # a button to press
            return ""
        state = field.get("/AS") or value
        return f"[{' ' if state in (None, '/Off') else 'x'}] {label}"
    values = value if isinstance(value, list) else [value]
    shown = ", ".join(str(item).strip() for item in values if item is not None)
    return f"{label.rstrip(' :')}: {shown}" if shown and kind in ("/Tx", "/Ch") else ""


def _inherited(field: Any, key: str) -> Any:
    """Return the value of a field, or of the field that it is a part of."""
    for _ in range(10):
        if key in field:
            return field[key]
        if "/Parent" not in field:
            return None
        field = field["/Parent"].get_object()
    return None
