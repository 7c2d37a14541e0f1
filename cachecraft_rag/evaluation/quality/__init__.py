"""Quality of answers with reuse: methods, origin conditions, measurements, intervals, reports, calibration of α.

Anything that compares answers or next-token distributions with full prefill's belongs here.
"""
