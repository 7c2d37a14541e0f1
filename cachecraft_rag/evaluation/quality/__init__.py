"""What reuse costs in answers: methods, measurements, reports."""
