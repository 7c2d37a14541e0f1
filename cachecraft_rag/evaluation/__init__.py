"""Measures what reuse costs in answer quality and what it saves in time.

quality      answers with reuse against those of full prefill (`cachecraft eval`, `cachecraft calibrate`)
latency      time to the first token (`cachecraft bench`)
formats      question sets from files
compression  prompt compressors, as baselines
"""
