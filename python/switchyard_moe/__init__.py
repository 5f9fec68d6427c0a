"""Experts of Mixture-of-Experts models as a service."""
