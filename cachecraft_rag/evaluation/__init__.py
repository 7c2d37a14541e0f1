"""How close answers with reuse stay to those of a full prefill."""
