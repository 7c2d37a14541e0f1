"""JSON schemas without a finite instance: recursion that never ends, such as a node that requires another node."""

from __future__ import annotations

from collections.abc import Mapping
from urllib.parse import unquote

_SCALARS = frozenset(("string", "number", "integer", "boolean", "null"))


def has_finite_instance(schema: object) -> bool:
    """Return False if every JSON value that fits the schema would be infinite.

    It is False too for a schema such as `false` or an empty list of types, which no value fits; not all such schemas
    are noticed. Only recursion through `$ref` makes a value infinite. The finite references are found as a least
    fixpoint: at first none counts as finite, and each round adds those that are finite given the round before. Keywords
    and values that are not known here count as harmless, so True does not mean that the schema is valid.

    Raises RecursionError for deep nesting, ValueError for a reference whose list index `int` cannot read, such as "²".

    >>> node = {"type": "object", "properties": {"next": {"$ref": "#"}}}
    >>> has_finite_instance(node), has_finite_instance(node | {"required": ["next"]})
    (True, False)
    """
    finite: dict[str, bool] = {}
    while True:
        before = dict(finite)
        result = _Round(schema, finite).is_finite(schema)
        if finite == before:
            return result


class _Round:
    """One round of the fixpoint over the references of a schema."""

    def __init__(self, root: object, finite: dict[str, bool]) -> None:
        self._root = root
        self._finite = finite  # by reference, as far as is known
        self._looked_at: set[str] = set()  # references that this round has followed

    def is_finite(self, schema: object) -> bool:
        """Return whether a part of the schema has a finite instance, as far as is known."""
        if not isinstance(schema, Mapping):
            return schema is not False
        if "const" in schema or "enum" in schema:
            return True

        parts = []
        if isinstance(schema.get("$ref"), str):
            parts.append(self._is_finite_reference(schema["$ref"]))
        if isinstance(schema.get("allOf"), list):
            parts += [self.is_finite(part) for part in schema["allOf"]]
        for name in ("anyOf", "oneOf"):
            if isinstance(schema.get(name), list) and schema[name]:
                parts.append(any(self.is_finite(part) for part in schema[name]))
        return all(parts) and self._has_finite_type(schema)

    def _has_finite_type(self, schema: Mapping[str, object]) -> bool:
        """Return whether at least one of the allowed types has a finite instance."""
        allowed = schema.get("type")
        types = [allowed] if isinstance(allowed, str) else allowed
        if not isinstance(types, list):  # any type, a number for example
            return True
        is_finite = {
            "object": self._is_finite_object(schema),
            "array": self._is_finite_array(schema),
        }
        return any(
            not isinstance(name, str) or name in _SCALARS or is_finite.get(name, True)
            for name in types
        )

    def _is_finite_object(self, schema: Mapping[str, object]) -> bool:
        properties = schema.get("properties")
        properties = properties if isinstance(properties, Mapping) else {}
        finite = {name for name, part in properties.items() if self.is_finite(part)}
        others = self.is_finite(schema.get("additionalProperties", True))
        required = schema.get("required")
        names = required if isinstance(required, list) else []
        for name in names:
            if not isinstance(name, str):
                continue
            if name in properties and name not in finite:
                return False
            if name not in properties and not others and "patternProperties" not in schema:
                return False
        least = schema.get("minProperties", 0)
        return (
            others
            or "patternProperties" in schema
            or not isinstance(least, int)
            or len(finite) >= least
        )

    def _is_finite_array(self, schema: Mapping[str, object]) -> bool:
        least = schema.get("minItems", 0)
        least = least if isinstance(least, int) else 0
        first = schema.get("prefixItems")
        first = first if isinstance(first, list) else []
        first_finite = [self.is_finite(part) for part in first]
        rest_finite = self.is_finite(schema.get("items", True))
        return all(first_finite[:least]) and (least <= len(first) or rest_finite)

    def _is_finite_reference(self, reference: str) -> bool:
        """Return what is known of a reference; its target is looked at once a round."""
        if reference not in self._looked_at and not self._finite.get(reference, False):
            self._looked_at.add(reference)
            self._finite.setdefault(reference, False)
            target = _target(self._root, reference)
            # A reference to another document, or by a name, is not followed.
            self._finite[reference] = target is None or self.is_finite(target)
        return self._finite.get(reference, False)


def _target(root: object, reference: str) -> object:
    """Return the part of the schema that a reference within it names, or None."""
    if reference != "#" and not reference.startswith("#/"):
        return None
    part = root
    for step in reference.split("/")[1:]:
        name = unquote(step).replace("~1", "/").replace("~0", "~")
        if isinstance(part, Mapping) and name in part:
            part = part[name]
        elif isinstance(part, list) and name.isdigit() and int(name) < len(part):
            part = part[int(name)]
        else:
            return None
    return part
