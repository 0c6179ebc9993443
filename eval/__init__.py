"""Measurements of `hf_specstate` on a real model. They live in the repository and are not installed."""
