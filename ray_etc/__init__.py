"""Elastic training of large language models on Ray."""
