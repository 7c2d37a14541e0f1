"""The text of PDF pages, with the values of their form fields."""

from __future__ import annotations

import io
from typing import Any

from cachecraft_rag.retrievers.reading.markup import Reading
from cachecraft_rag.retrievers.reading.tables import FormatError


def pdf_to_text(data: bytes) -> Reading:
    """Return the text of a PDF, a form feed between its `pages`; fields of a form are `label: value` lines below each.

    The metadata `pages` is their number. Raises FormatError for a file that is locked with a password.
    """
    from pypdf import PasswordType, PdfReader

    reader = PdfReader(io.BytesIO(data))
    if reader.is_encrypted and reader.decrypt("") == PasswordType.NOT_DECRYPTED:
        raise FormatError("is locked with a password; save a copy without one")
    pages = [_page_text(page).replace("\f", "\n") for page in reader.pages]
    empty = ", ".join(str(number) for number, page in enumerate(pages, 1) if not page.strip())
    losses = [f"pages without text, which may be scans ({empty[:80]}): run OCR"] if empty else []
    return Reading("\f".join(pages), {"format": "text", "pages": len(pages)}, losses)


def _page_text(page: Any) -> str:
    annotations = [annotation.get_object() for annotation in page.get("/Annots") or ()]
    fields = [annotation for annotation in annotations if annotation.get("/Subtype") == "/Widget"]
    pieces: list[tuple[float, float, str]] = []  # x, y, text

    def note(text: str, matrix: list[float], text_matrix: list[float], *_font: object) -> None:
        if text.strip():
            x, y = text_matrix[4:]
            x, y = (x * matrix[at] + y * matrix[at + 2] + matrix[at + 4] for at in (0, 1))
            pieces.append((x, y, " ".join(text.split())))

    text = page.extract_text(visitor_text=note if fields else None)
    return "\n".join([text, *filter(None, (_field_line(field, pieces) for field in fields))])


def _field_line(field: Any, pieces: list[tuple[float, float, str]]) -> str:
    """Return a form field as `label: value`, or "" if it is empty."""
    kind = field.get_inherited("/FT")
    value = field.get_inherited("/V")
    left, bottom, right, top = (float(edge) for edge in field["/Rect"])
    beside = [
        (left - x if x < left else x - right, label)
        for x, y, label in pieces
        if bottom - 4 <= y <= top and (x < left or kind == "/Btn")
    ]
    name = field.get_inherited("/TU") or field.get_inherited("/T") or ""
    label = min(beside)[1] if beside else str(name)
    if kind == "/Btn":
        is_push_button = int(field.get_inherited("/Ff") or 0) & (1 << 16)
        is_ticked = (field.get("/AS") or value) not in (None, "/Off")
        return "" if is_push_button else f"[{'x' if is_ticked else ' '}] {label}"
    values = value if isinstance(value, list) else [value]
    shown = ", ".join(str(item).strip() for item in values if item is not None)
    return f"{label.rstrip(' :')}: {shown}" if shown and kind in ("/Tx", "/Ch") else ""
